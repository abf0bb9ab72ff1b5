"""Lines that the commands print, from results that are made by hand."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_convert import commands, inspection
from mca_convert.api import ConversionResult
from mca_convert.compare import Comparison, TensorDifference
from mca_convert.fills import Fill
from mca_convert.forecast import ConversionPlan, PlannedStage
from mca_convert.inspection import Inspection
from mca_models.storage.byte_ranges import Gather
from mca_models.storage.safetensors import TensorInfo
from mca_models.weights import Param

LAYOUT = ParallelLayout(tensor_model_parallel_size=2)


@pytest.mark.parametrize("layout", [None, LAYOUT])
@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(("seconds", "words"), [(2.0, "2.0 s (1.50 GB/s)"), (0.0, "0.0 s (3.00 TB/s)")])
def test_a_conversion_ends_with_its_kind_and_speed(
    layout: ParallelLayout | None, is_adapter: bool, seconds: float, words: str
) -> None:
    target: Any = "hf" if layout is None else "mca"
    kind = ("PEFT adapter" if is_adapter else "Hugging Face checkpoint") if layout is None else None
    kind = kind or f"MCA {'adapter' if is_adapter else 'checkpoint'}, {LAYOUT}"
    result = ConversionResult(
        path=Path("out"),
        target=target,
        model_type="llama",
        layout=layout,
        is_adapter=is_adapter,
        tensors=1,
        files=2,
        nbytes=3 * 10**9,
        seconds=seconds,
    )
    rest = "" if is_adapter else f", 2 files, 3.00 GB in {words}"
    assert commands._summary(result) == f"out: llama, {kind}, 1 tensor{rest}\n"


def stage(rank: int, expert_bytes: int) -> PlannedStage:
    return PlannedStage(
        rank=rank,
        holds=f"layers {rank}",
        layers=(rank,),
        prediction_layers=(),
        has_embedding=False,
        has_loss=False,
        tensors=3,
        dense_bytes=2000,
        expert_bytes=expert_bytes,
    )


MODEL: dict[str, Any] = {
    "kind": "Hugging Face checkpoint",
    "model_type": "llama",
    "tensors": 1,
    "parameters": 2000,
    "read_bytes": 4000,
}
WRITES: dict[str, Any] = {"files": {"a.safetensors": 999}, "written_bytes": 999, "peak_bytes": 1_500_000}
LINES = [
    "source     in: Hugging Face checkpoint llama",
    "reads      1 tensor, 2,000 parameters, 4.00 KB",
    "target     MCA, tp 2",
    "writes     1 file, 999 bytes of weights",
    "memory     about 1.50 MB at its peak, with 1 thread",
]
CAN = "this conversion can run; nothing was written"


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            MODEL | WRITES | {"target": "hf", "workers": 2, "notes": ["one", "two"]},
            [
                *LINES[:2],
                "target     Hugging Face",
                LINES[3],
                LINES[4].replace("1 thread", "2 threads"),
                "",
                "file                size",
                "a.safetensors  999 bytes",
                "",
                "note: one",
                "note: two",
                CAN,
            ],
        ),
        (
            MODEL | WRITES | {"layout": "tp 2", "workers": 1, "stages": [stage(0, 0), stage(1, 0)]},
            [
                *LINES,
                "",
                "pipeline rank  holds     tensors  a tensor rank",
                "            0  layers 0        3        2.00 KB",
                "            1  layers 1        3        2.00 KB",
                "",
                CAN,
            ],
        ),
        (
            MODEL | WRITES | {"layout": "tp 2", "workers": 1, "stages": [stage(0, 0), stage(1, 1000)]},
            [
                *LINES,
                "",
                "pipeline rank  holds     tensors  a tensor rank  an expert rank    a GPU",
                "            0  layers 0        3        2.00 KB         0 bytes  2.00 KB",
                "            1  layers 1        3        2.00 KB         1.00 KB  3.00 KB",
                "",
                CAN,
            ],
        ),
        (
            {"refusals": ["a", "b"]},
            [
                "source     in: unknown",
                "target     MCA",
                "",
                "this conversion would fail, for 2 reasons:",
                "  - a",
                "  - b",
            ],
        ),
        (
            {"refusals": ["a"], "layout": "tp 2", "target": "hf"},
            [
                "source     in: unknown",
                "target     Hugging Face",
                "",
                "this conversion would fail, for this reason:",
                "  - a",
            ],
        ),
    ],
)
def test_a_plan_has_a_line_for_each_fact(values: dict[str, Any], lines: list[str]) -> None:
    plan = ConversionPlan(**({"source": "in", "target": "mca"} | values))
    assert list(commands._plan_lines(plan)) == lines


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, ["a: MCA checkpoint"]),
        ({"problem": "cut"}, ["a: MCA checkpoint, not readable", "  problem  cut"]),
        ({"facts": {"layers": 4, "d": 5}}, ["a: MCA checkpoint", "  layers  4", "  d       5"]),
        (
            {
                "facts": {"layers": 4},
                "files": {"x": 500, "y": 600},
                "dtypes": {"F32": (1, 400), "BF16": (2, 700)},
                "biggest": [("w", "BF16", [2, 3], 12)],
                "not_finite": {},
            },
            [
                "a: MCA checkpoint",
                "  layers   4",
                "  files    2 with weights, 1.10 KB",
                "  BF16     2 tensors, 700 bytes",
                "  F32      1 tensor, 400 bytes",
                "  biggest  w BF16 [2, 3], 12 bytes",
                "  values   all are finite",
            ],
        ),
        (
            {"not_finite": {"w": 1, "v": 2}},
            ["a: MCA checkpoint", "  not finite  w, 1 value", "  not finite  v, 2 values"],
        ),
    ],
)
def test_an_inspection_has_a_line_for_each_fact(values: dict[str, Any], lines: list[str]) -> None:
    assert commands._inspection_text(Inspection("a", "MCA checkpoint", **values)).split("\n") == lines


def difference(**values: Any) -> TensorDifference:
    plain: dict[str, Any] = {"elements": 2, "index": (1, 0), "values": (1.5, float("nan")), "largest": 0.25}
    return TensorDifference(**(plain | values))


@pytest.mark.parametrize(
    ("values", "tolerance", "lines"),
    [
        (
            {"tensors": 2, "elements": 1000},
            None,
            ["same model, bit for bit: a and b, 2 tensors, 1,000 elements"],
        ),
        (
            {"tensors": 1, "elements": 1, "adapters": True},
            0.5,
            ["same adapter, within 0.5: a and b, 1 tensor, 1 element"],
        ),
        (
            {"differences": {"w": difference()}},
            None,
            [
                "different models: a and b",
                "  w: 2 elements differ, the first at [1, 0]: 1.5 and nan; largest difference 0.25",
            ],
        ),
        (
            {"problems": [f"problem {number}" for number in range(12)], "adapters": True},
            None,
            ["different adapters: a and b", *(f"  problem {number}" for number in range(10)), "  and 2 more"],
        ),
        (
            {"problems": ["p"], "differences": {f"w{number:02}": difference() for number in range(11)}},
            None,
            None,
        ),
        (
            {"tensors": 1, "elements": 1, "not_finite": ({"w": 1}, {"w": 1})},
            None,
            ["same", "warning: in both, 1 tensor has"],
        ),
        (
            {"tensors": 1, "elements": 1, "not_finite": ({"w": 1}, {})},
            None,
            ["same", "warning: a: 1 tensor has"],
        ),
        (
            {"tensors": 1, "elements": 1, "not_finite": ({}, {"w": 1})},
            None,
            ["same", "warning: b: 1 tensor has"],
        ),
        (
            {"tensors": 1, "elements": 1, "not_finite": ({"w": 2}, {"w": 1})},
            None,
            ["same", "warning: a: 1 tensor has", "warning: b: 1 tensor has"],
        ),
    ],
)
def test_a_comparison_has_a_line_for_each_difference_up_to_ten(
    values: dict[str, Any], tolerance: float | None, lines: list[str] | None
) -> None:
    options = Namespace(first="a", second="b", tolerance=tolerance)
    found = list(commands._comparison_lines(Comparison(**values), options))
    if lines is None:
        assert len(found) == 1 + 1 + 10 + 1 and found[1] == "  p"
        assert (
            found[2].startswith("  w00: ") and found[-2].startswith("  w09: ") and found[-1] == "  and 1 more"
        )
    else:
        assert len(found) == len(lines)
        assert all(line.startswith(expected) for line, expected in zip(found, lines, strict=True)), found


def test_numbers_that_json_lacks_are_words() -> None:
    result = Comparison(
        differences={"w": difference(largest=float("inf"))}, not_finite=({"w": 1}, {}), tensors=3, elements=4
    )
    options = Namespace(first="a", second="b", tolerance=0.5)
    assert commands._comparison_document(result, options) == {
        "what": "model",
        "first": "a",
        "second": "b",
        "tolerance": 0.5,
        "same": False,
        "tensors": 3,
        "elements": 4,
        "not_finite": {"first": {"w": 1}, "second": {}},
        "problems": [],
        "differences": {
            "w": {"elements": 2, "first": {"index": (1, 0), "values": [1.5, "nan"]}, "largest": "inf"}
        },
    }


@pytest.mark.parametrize(
    ("scales", "dtype", "nbytes"),
    [(None, "BF16", 2 * 300 * 200), (None, "F32", 4 * 300 * 200), ("s", "F8_E4M3", 300 * 200 + 4 * 3 * 2)],
)
def test_bytes_of_a_fill_include_its_scales(scales: str | None, dtype: str, nbytes: int) -> None:
    """Scales are fp32, one for each block of 128 x 128."""
    param = Param(mca="x", hf=("x",))
    fill = Fill("file", "w", 0, Gather((300, 200), ()), (), "BF16", dtype, param, scales)
    assert fill.nbytes == nbytes
    if scales:
        assert fill.count_bytes(128 * 200) == 128 * 200 + 4 * 2


def test_files_and_dtypes_are_counted_with_their_bytes(tmp_path: Path) -> None:
    for name, nbytes in (("a", 100), ("b", 7)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    infos = [
        TensorInfo(name, dtype, (nbytes,), 0, nbytes, tmp_path / file)
        for name, dtype, nbytes, file in (("x", "U8", 3, "b"), ("y", "U8", 4, "a"), ("z", "I8", 5, "a"))
    ]
    found = Inspection("path", "kind")
    inspection._count(infos, tmp_path, found)
    assert (found.dtypes, found.files) == ({"U8": (2, 7), "I8": (1, 5)}, {"a": 100, "b": 7})
    elsewhere = Inspection("path", "kind")
    inspection._count(infos[:1], tmp_path / "other", elsewhere)
    assert elsewhere.files == {str(tmp_path / "b"): 7}
    shapes = [("a", "F32", [2]), ("b", "BF16", [3, 3]), ("c", "F32", []), ("d", "F32", [2])]
    inspection._biggest(shapes, found, 3)
    assert found.biggest == [("b", "BF16", [3, 3], 18), ("a", "F32", [2], 8), ("d", "F32", [2], 8)]
