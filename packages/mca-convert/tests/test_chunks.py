from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_convert import compare
from mca_convert.engine import first_scale
from mca_convert.fills import Chunk, Chunking, Fill, split
from mca_convert.pool import Limits
from mca_convert.reader import computed_bytes, is_any_kept
from mca_models.storage.byte_ranges import Gather, Move, clip
from mca_models.weights import Param

PARAM = Param(mca="x", hf=("x",))
moves = st.builds(
    lambda source, target, run, repeat, source_gap, target_gap, source_step, target_step: Move(
        0,
        source,
        target,
        run,
        repeat,
        run + source_gap,
        (run - 1) * target_step + 1 + target_gap,
        source_step,
        target_step,
    ),
    *[
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(1, 9),
        st.integers(1, 6),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 3),
        st.integers(1, 3),
    ],
)


def pairs(move: Move, base: int = 0) -> set[tuple[int, int]]:
    return {
        (
            move.source + i * move.source_stride + j * move.source_step,
            base + move.target + i * move.target_stride + j * move.target_step,
        )
        for i in range(move.repeat)
        for j in range(move.run)
    }


@settings(max_examples=300, deadline=None)
@given(moves, st.integers(0, 60), st.integers(1, 40))
def test_clip_keeps_exactly_what_lies_inside(move: Move, start: int, length: int) -> None:
    parts = [pairs(part, start) for part in clip(move, start, start + length)]
    expected = {pair for pair in pairs(move) if start <= pair[1] < start + length}
    assert set().union(*parts) == expected and sum(map(len, parts)) >= len(expected)
    assert all(parts), "no part is empty"


@settings(max_examples=200, deadline=None)
@given(moves, st.integers(1, 50))
def test_chunks_cover_a_tensor_once(move: Move, elements: int) -> None:
    size = max(target for _, target in pairs(move)) + 3
    gather = Gather((size,), (move,), ((size - 3, size),))
    seen: list[tuple[int, int]] = []
    zeros: list[int] = []
    position = 0
    for chunk in split(gather, elements):
        assert chunk.start == position and 0 < chunk.stop - chunk.start <= elements
        position = chunk.stop
        for part in chunk.moves:
            seen += sorted(pairs(part, chunk.start))
        assert all(start < stop for start, stop in chunk.zeros)
        zeros += [chunk.start + i for start, stop in chunk.zeros for i in range(start, stop)]
    assert position == size and len(seen) == len(set(seen)) and set(seen) == pairs(move)
    assert zeros == [size - 3, size - 2, size - 1]


def test_chunks_are_cut_once_for_each_gather() -> None:
    chunking, gather = Chunking(16), Gather((10,), (Move(0, 0, 0, 10, 1, 10, 10),))
    first, second = (Fill("file", name, 0, gather, (), "F32", "F32", PARAM) for name in "ab")
    assert chunking.chunks(first) is chunking.chunks(second)
    assert [(chunk.start, chunk.stop) for chunk in chunking.chunks(first)] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize(
    ("nbytes", "bands"), [(1, 1), (128 * 200 * 2, 1), (2 * 128 * 200 * 2, 2), (1 << 30, 3)]
)
def test_rows_of_fp8_blocks_are_not_cut(nbytes: int, bands: int) -> None:
    """A chunk has at least one of three rows of blocks, and no more than fit the buffer."""
    gather = Gather((300, 200), (Move(0, 0, 0, 60000, 1, 60000, 60000),))
    fill = Fill("file", "w", 0, gather, (), "BF16", "F8_E4M3", PARAM, scales="s")
    starts = range(0, 60000, bands * 128 * 200)
    expected = [(start, min(start + bands * 128 * 200, 60000)) for start in starts]
    assert [(chunk.start, chunk.stop) for chunk in Chunking(nbytes).chunks(fill)] == expected


def test_two_checkpoints_are_compared_in_the_same_stretches(convert, tmp_path, monkeypatch) -> None:
    """Whatever the strides of their moves are: with buffers that rows do not fill evenly."""
    import tiny_hf

    from mca_convert.cli import main
    from mca_convert.pool import Limits

    source = tiny_hf.save("gpt_oss", tmp_path / "hf", "bfloat16", num_hidden_layers=2)
    first, second = convert(source, "a", tp=2, etp=1), convert(source, "b", pp=2)
    for nbytes in (62, 202, 1000):
        monkeypatch.setattr(Limits, "buffer_bytes", property(lambda self, nbytes=nbytes: nbytes))
        for one, two in ((source, first), (first, second)):
            assert main(["verify", str(one), str(two)]) == 0


def test_buffers_share_the_memory_and_are_whole_pages() -> None:
    assert Limits(workers=2, memory=6_000_000).buffer_bytes == 1_000_000 // 4096 * 4096
    assert Limits(workers=2, memory=1).buffer_bytes == 64 << 10
    assert Limits(workers=2, memory=1 << 40).buffer_bytes == 8 << 20


@pytest.mark.parametrize(
    ("expert", "band", "first"), [(0, 0, 0), (0, 1, 2), (0, 2, 4), (1, 0, 6), (2, 1, 14), (3, 2, 22)]
)
def test_a_chunk_knows_the_first_of_its_scales(expert: int, band: int, first: int) -> None:
    """Experts of 300 x 200: three rows of two blocks of 128."""
    gather: Any = SimpleNamespace(shape=(300, 200), size=60000)
    fill = Fill("file", "w", expert * 60000, gather, (), "BF16", "F8_E4M3", PARAM, scales="s")
    assert first_scale(fill, Chunk(band * 128 * 200, (band + 1) * 128 * 200, (), ())) == first


def test_a_fill_without_elements_has_the_first_scale() -> None:
    gather: Any = SimpleNamespace(shape=(0, 200), size=0)
    fill = Fill("file", "w", 0, gather, (), "BF16", "F8_E4M3", PARAM, scales="s")
    assert first_scale(fill, Chunk(0, 0, (), ())) == 0


@pytest.mark.parametrize(("limit", "kept"), [(24, True), (23, False)])
def test_a_computed_part_is_kept_if_its_bytes_fit(limit: int, kept: bool) -> None:
    part: Any = SimpleNamespace(info=SimpleNamespace(itemsize=2), shape=(3, 4))
    assert computed_bytes(part) == 24
    assert is_any_kept((part,), limit) is kept


def test_compared_stretches_fit_the_buffer_in_the_larger_dtype(monkeypatch) -> None:
    sources: Any = [
        SimpleNamespace(dtype=dtype, params=[Param(mca="w", hf=("w",))]) for dtype in ("BF16", "F32")
    ]
    for source in sources:
        source.gathers = lambda param, side: [Gather((8,), (Move(0, 0, 0, 8, 1, 8, 8),))]
        source.parts = lambda param: ()
    monkeypatch.setattr(compare, "source_dtypes", lambda source: {"w": source.dtype})
    limits: Any = SimpleNamespace(buffer_bytes=16)
    pairs = [*compare._pairs(*sources, SimpleNamespace(tensors=0, elements=0), limits)]
    stretches = [(first[0].start, first[0].stop) for _, _, (first, _) in pairs]
    assert stretches == [(0, 4), (4, 8)], "16 bytes are 4 numbers of fp32"
