"""Rewritten gathers fill the same target from the raw runs of bytes."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_models.storage.byte_ranges import Gather
from mca_models.storage.copy_plan import Rule, plan_moves
from mca_models.storage.lazy_tensor import Block, GridTensor, StridedTensor
from mca_models.storage.source import copy_move
from mca_models.torch_checkpoint.source import StoredTensor, storages, to_storage
from mca_models.weights import COLUMN, GATED, ROW, Param


def fill(gather: Gather, flats: list[Any]) -> Any:
    out = np.full(gather.size, -1, np.int32)
    for start, stop in gather.zeros:
        out[start:stop] = 0
    for move in gather.moves:
        copy_move(flats[move.part], out, move)
    return out


def stored(file: Path, at: int, array: Any, wide: int, transposed: bool) -> StridedTensor:
    """``array`` as every ``wide``-th column of what is appended to ``file``."""
    content = np.full((*array.shape[:-1], array.shape[-1] * wide), 99, np.int32)
    content[..., ::wide] = array
    if transposed:
        content = np.ascontiguousarray(content.T)
    view = content.T[..., ::wide] if transposed else content[..., ::wide]
    with file.open("ab") as stream:
        offset = stream.tell()
        stream.write(content.tobytes())
    strides = tuple(step // 4 for step in view.strides)
    return StridedTensor(f"t{at}", "I32", array.shape, strides, offset, file)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    shard=st.sampled_from([COLUMN, ROW, GATED]),
    source=st.sampled_from([1, 2, 4]),
    target=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
)
def test_a_rewritten_gather_fills_the_same(
    tmp_path_factory: Any, data: Any, shard: Any, source: int, target: int, rows: int, columns: int
) -> None:
    whole = np.arange(24 * rows * 12 * columns, dtype=np.int32).reshape(24 * rows, 12 * columns)
    rule = Rule.from_param(Param(mca="x", hf=("x",), shard=shard))
    pieces = [shard.take(whole, rank, source) for rank in range(source)]
    file = tmp_path_factory.mktemp("s") / "data"
    tensors: list[StoredTensor] = []
    for piece in pieces:
        wide, transposed = data.draw(st.integers(1, 2)), data.draw(st.booleans())
        if data.draw(st.booleans()):
            tensors.append(stored(file, len(tensors), piece, wide, transposed))
            continue
        cuts = [
            sorted({0, size, *data.draw(st.lists(st.integers(1, size), max_size=2))}) for size in piece.shape
        ]
        chunks = [
            Block((r0, c0), stored(file, 0, piece[r0:r1, c0:c1], wide, transposed))
            for (r0, r1), (c0, c1) in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
        ]
        tensors.append(GridTensor("g", "I32", piece.shape, tuple(chunks)))
    raw = [part.flat() for tensor in tensors for part in storages(tensor)]
    for gather, expected in zip(
        plan_moves(rule, whole.shape, source, target),
        [shard.take(whole, rank, target) for rank in range(target)],
        strict=True,
    ):
        assert (fill(gather, [tensor.flat()[:] for tensor in tensors]) == expected.reshape(-1)).all()
        rewritten = to_storage(gather, tensors)
        assert (fill(rewritten, raw) == expected.reshape(-1)).all()
        assert rewritten.shape == gather.shape


def test_columns_of_a_wider_tensor_are_one_strided_move(tmp_path: Path) -> None:
    file = tmp_path / "data"
    wide = np.arange(1000 * 64, dtype=np.int32).reshape(1000, 64)
    file.write_bytes(wide.tobytes())
    half = StridedTensor("w", "I32", (1000, 32), (64, 1), 128, file)
    (gather,) = plan_moves(Rule.from_param(Param(mca="x", hf=("x",))), half.shape, 1, 1)
    (move,) = to_storage(gather, [half]).moves
    assert (move.run, move.repeat, move.source_stride, move.target_stride) == (32, 1000, 64, 32)
    assert to_storage(gather, [half]) is to_storage(gather, [half])
