"""Comparison of values, and search for those that are not finite, of arrays and moves made by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mca_convert import compare, non_finite
from mca_convert.compare import Comparison, _Recorder
from mca_convert.fills import Chunk
from mca_convert.pool import Limits
from mca_models.storage.byte_ranges import Gather, Move
from mca_models.weights import Param

NAN, INF = float("nan"), float("inf")


def recorded(
    first: list[float], second: list[float], tolerance: float | None = None, dtype: str = "f4", start: int = 0
) -> Comparison:
    result = Comparison()
    arrays = [np.array(values, dtype) for values in (first, second)]
    _Recorder(result, tolerance).compare("w", (4, 3), arrays, start)
    return result


@pytest.mark.parametrize(
    ("second", "tolerance", "elements", "index", "largest"),
    [
        ([1.0, 2.0, 3.0, 4.0], None, 0, None, None),
        ([1.0, 2.5, 3.0, 3.0], None, 2, (2, 0), 1.0),
        ([1.0, 2.5, 3.0, 3.0], 0.75, 1, (2, 2), 1.0),
        ([1.0, 2.5, 3.0, 3.0], 1.0, 0, None, None),
        ([NAN, 2.0, 3.0, 4.0], 9.0, 1, (1, 2), INF),
        ([1.0, 2.0, 3.0, -INF], 9.0, 1, (2, 2), INF),
    ],
)
def test_the_first_and_the_largest_difference_are_recorded(
    second: list[float], tolerance: float | None, elements: int, index: Any, largest: float | None
) -> None:
    """The elements begin at the sixth of a tensor of rows of three."""
    first = [1.0, 2.0, 3.0, 4.0]
    found = recorded(first, second, tolerance, start=5).differences
    if not elements:
        assert found == {}
        return
    assert (found["w"].elements, found["w"].index, found["w"].largest) == (elements, index, largest)
    place = index[0] * 3 + index[1] - 5
    assert found["w"].values == pytest.approx((first[place], second[place]), nan_ok=True)


def test_differences_of_fp64_are_those_of_fp64() -> None:
    found = recorded([1.0, 2.0], [1.0, 2.0 + 2**-40], dtype="f8").differences["w"]
    assert (found.largest, found.values) == (2**-40, (2.0, 2.0 + 2**-40))


def test_two_kinds_of_not_a_number_differ_by_nothing() -> None:
    result = Comparison()
    arrays = [np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00001, 0x7FC00000)]
    _Recorder(result, None).compare("w", (), arrays)
    assert (result.differences["w"].largest, result.differences["w"].index) == (0.0, ())
    assert result.not_finite == ({"w": 1}, {"w": 1})


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_ranges_of_a_tensor_are_compared_in_any_order(order: tuple[int, ...]) -> None:
    ranges = [(0, [1.0, 5.0], [1.0, 2.0]), (2, [INF, 1.0], [INF, 9.0]), (8, [1.0, 2.0], [1.5, NAN])]
    result = Comparison()
    recorder = _Recorder(result, None)
    for place in order:
        start, *values = ranges[place]
        recorder.compare("w", (10,), [np.array(each, np.float32) for each in values], start)
    found = result.differences["w"]
    assert (found.elements, found.index, found.values, found.largest) == (4, (1,), (5.0, 2.0), INF)
    assert result.not_finite == ({"w": 1}, {"w": 2})


def test_the_bytes_of_progress_are_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collector:
        def __init__(self, *_: Any) -> None:
            pass

        def collect(self, chunk: Any, parts: Any, dtype: str, buffer: str) -> Any:
            return np.zeros(4, dtype)

    sides = tuple((SimpleNamespace(start=0), (), dtype) for dtype in ("f4", "f2"))
    pairs = [("w", (4,), sides)] * 2
    sources: Any = [
        SimpleNamespace(
            check_duplicates=lambda: None,
            tensors=lambda nbytes=nbytes: [SimpleNamespace(file="a", nbytes=nbytes)],
            checksums=dict,
        )
        for nbytes in (32, 16)
    ]
    monkeypatch.setattr(compare, "_different_models", lambda *_: [])
    monkeypatch.setattr(compare, "_pairs", lambda *_: iter(pairs))
    monkeypatch.setattr(compare, "Collector", Collector)
    calls: list[Any] = []
    limits = Limits(workers=1)
    assert compare.compare_models(
        *sources, limits, tolerance=0.0, progress=lambda *given: calls.append(given)
    ).same
    assert calls == [(16, 32), (32, 32)]


@pytest.mark.parametrize(
    ("values", "cast", "mask", "too_large"),
    [
        ([1.0, 2.0], None, [], []),
        ([1.0, NAN, -INF], None, [1, 2], []),
        ([70000.0, NAN, 1.0, -70000.0], "F16", [1], [0, 3]),
        ([70000.0, NAN], "BF16", [1], []),
        ([70000.0, NAN], "F32", [1], []),
        ([3.4e38, -INF, 1.0], "BF16", [1], [0]),
    ],
)
def test_values_that_are_not_finite_are_not_those_that_a_cast_makes_infinite(
    values: list[float], cast: str | None, mask: list[int], too_large: list[int]
) -> None:
    found = non_finite._masks(np.array(values, np.float32), cast)
    assert [np.flatnonzero(each).tolist() for each in found] == [mask, too_large]


@pytest.mark.parametrize(
    ("wrong", "file"), [(0, "b"), (2, "b"), (1, "a"), (3, "a"), (4, "c"), (5, "c"), (6, "a")]
)
def test_the_file_of_a_wrong_value_is_that_of_its_move(wrong: int, file: str) -> None:
    """Moves read every other element of the first four from two files, and the next two from a third."""
    moves = (Move(1, 0, 0, 1, 2, 1, 2), Move(0, 0, 1, 2, 1, 2, 2, 1, 2), Move(2, 0, 4, 2, 1, 2, 2))
    parts: Any = [SimpleNamespace(info=SimpleNamespace(file=Path(name))) for name in "abc"]
    mask = np.zeros(7, bool)
    mask[wrong] = True
    assert non_finite._source_file(mask, Chunk(0, 7, moves, ((6, 7),)), parts) == Path(file)


@pytest.mark.parametrize(("dtype", "sizes"), [("F32", [4, 4, 2]), ("BF16", [8, 2])])
def test_values_are_searched_in_stretches_that_fit_the_buffer(dtype: str, sizes: list[int]) -> None:
    param = Param(mca="w", hf=("w",), stacked=True, expert=3)
    gather = Gather((10,), (Move(0, 0, 0, 10, 1, 10, 10),))
    source: Any = SimpleNamespace(
        parts=lambda param: [SimpleNamespace(info=SimpleNamespace(dtype=dtype))],
        gathers=lambda param, side: [gather],
    )
    limits: Any = SimpleNamespace(buffer_bytes=16)
    found = list(non_finite._chunks(source, [param], limits))
    assert [chunk.stop - chunk.start for _, _, chunk in found] == sizes
    assert {(label, each is param) for label, each, _ in found} == {("w[3]", True)}
