"""Chunks that follow one another along one axis fill a tensor, however many there are."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mca_models.storage import lazy_tensor
from mca_models.storage.lazy_tensor import Block, GridTensor, _is_stack, _tiling_fault


def chunk(offsets: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return SimpleNamespace(offsets=offsets, tensor=SimpleNamespace(shape=shape))


def stacked(shape: tuple[int, ...], axis: int, lengths: list[int]) -> list[Any]:
    """Return chunks of ``lengths`` along ``axis``, the last one first."""
    found, start = [], 0
    for length in lengths:
        offsets = tuple(start if each == axis else 0 for each in range(len(shape)))
        found.append(
            chunk(offsets, tuple(length if each == axis else size for each, size in enumerate(shape)))
        )
        start += length
    return found[::-1]


@pytest.mark.parametrize("lengths", [[6], [2, 4], [1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6,), 0), ((6, 3), 0), ((3, 6), 1), ((3, 6, 2), 1), ((2, 3, 6), 2)]
)
def test_a_stack_needs_no_grid(
    shape: tuple[int, ...], axis: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_tensor, "MAX_GRID_CELLS", 0)
    chunks = stacked(shape, axis, lengths)
    assert _is_stack(shape, chunks) and _tiling_fault(shape, chunks) is None
    if len(lengths) > 1:
        assert not _is_stack(shape, chunks[1:]) and not _is_stack(shape, [*chunks, chunks[0]])
        longer = tuple(size + (each == axis) for each, size in enumerate(shape))
        assert not _is_stack(longer, chunks)
        assert _tiling_fault(shape, chunks[1:]) == "are cut in too many ways"


def test_one_number_is_one_chunk() -> None:
    assert _is_stack((), [chunk((), ())])
    assert not _is_stack((), [chunk((), ()), chunk((), ())]) and not _is_stack((), [])
    assert not _is_stack((2,), [chunk((0,), (2, 1))])


def test_chunks_of_a_grid_fill_it_once() -> None:
    quarters = [chunk((2 * row, 3 * column), (2, 3)) for row, column in product(range(2), range(2))]
    assert not _is_stack((4, 6), quarters) and _tiling_fault((4, 6), quarters) is None
    assert _tiling_fault((4, 6), quarters[1:]) == "leave a hole"
    assert _tiling_fault((4, 6), [*quarters, chunk((0, 0), (4, 3))]) == "overlap"
    assert _tiling_fault((4, 5), quarters) == "reach outside of its shape [4, 5]"


@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 3), (2, 4), (3, 4), (2, 2), (3, 1)])
def test_rows_of_a_grid_are_those_of_the_full_tensor(start: int, stop: int | None) -> None:
    full = np.arange(24, dtype=np.float32).reshape(4, 6)
    blocks = []
    for row, column in product((2, 0), (0, 3)):  # in any order
        part = full[row : row + 2, column : column + 3]
        tensor: Any = SimpleNamespace(shape=part.shape, array=lambda part=part: part)
        blocks.append(Block((row, column), tensor))
    grid = GridTensor("w", "F32", (4, 6), tuple(blocks))
    assert np.array_equal(grid.read(start, stop), full[start:stop])
