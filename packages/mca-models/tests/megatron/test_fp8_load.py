"""Scales of fp8 weights that come in pieces."""

import pytest
import torch

from mca_models.megatron.state import fp8
from mca_models.megatron.state.fp8 import DequantizedWeights
from mca_models.quantization.fp8 import scale_shape

WEIGHT = torch.ones(256, 128).to(torch.float8_e4m3fn)


def faults(*weights: tuple[object, ...]) -> list[str]:
    found: list[str] = []
    reader = DequantizedWeights(
        lambda name: (256, 128) if name == "w" else None,
        lambda name, fault: found.append(fault),
        lambda name: True,
    )
    list(reader.dequantize([("w", WEIGHT), *weights]))  # type: ignore[list-item]
    return found


def test_scales_that_come_twice_are_reported_however_few_rows():
    first, second, both = (
        ("w_scale_inv", torch.ones(1, 1), 0),
        ("w_scale_inv", torch.ones(1, 1), 1),
        torch.ones(2, 1),
    )
    assert faults(first, second) == []
    assert faults(("w_scale_inv", both)) == []
    for overlapping in (("w_scale_inv", both), ("w_scale_inv", both, 0)):
        assert faults(first, overlapping) == [
            "w_scale_inv came twice",
            "w is fp8, and w_scale_inv is missing or incomplete",
        ]
    assert faults(("w_scale_inv", both, 1))[0] == (
        "w_scale_inv has shape [2, 1] from row 1 on, expected [2, 1]"
    )
    assert (
        faults(second, ("w_scale_inv", torch.ones(1, 1)))[0] == "w_scale_inv came twice"
    )  # it is of all rows


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_of_any_shape_is_that_of_all_rows(shape: tuple[int, ...]) -> None:
    assert faults(("w_scale_inv", torch.ones(shape))) == []


@pytest.mark.parametrize("elements", [1, 1 << 22])
def test_a_tensor_in_fp8_does_not_depend_on_the_rows_converted_at_a_time(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 300, 200)
    values, scales = fp8.quantised("name", weight)
    monkeypatch.setattr(fp8, "_STEP", elements)
    again = fp8.quantised("name", weight)
    assert torch.equal(again[0].float(), values.float()) and torch.equal(again[1], scales)


@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((300, 200), 1),
        ((300, 200), 3),
        ((3, 130, 200), 1),
        ((3, 130, 200), 3),
        ((2, 2, 130, 129), 1),
        ((2, 2, 130, 129), 2),
    ],
)
def test_values_are_multiplied_by_the_scales_of_their_blocks(
    shape: tuple[int, ...], pieces: int, scales_first: bool
) -> None:
    """Values come whole or in slices of the first axis, before their scales or after."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*scale_shape(shape), generator=generator)
    blocks = scales.repeat_interleave(128, -1)[..., : shape[-1]].repeat_interleave(128, -2)[
        ..., : shape[-2], :
    ]
    step = shape[0] // pieces
    slices = [
        ("w", values[i : i + step], i) if pieces > 1 else ("w", values) for i in range(0, shape[0], step)
    ]
    scaled = [("w_scale_inv", scales)]
    faults: list[str] = []
    reader = DequantizedWeights(
        lambda name: shape if name == "w" else None,
        lambda name, fault: faults.append(fault),
        lambda name: True,
    )
    found = [*reader.dequantize([*scaled, *slices] if scales_first else [*slices, *scaled])]  # type: ignore[list-item]
    assert faults == [] and [each[2:] for each in found] == [each[2:] for each in slices]
    torch.testing.assert_close(
        torch.cat([each[1] for each in found]), values.float() * blocks, rtol=0, atol=0
    )


@pytest.mark.parametrize(("first", "columns", "used"), [(1, 128, True), (0, 127, True), (0, 128, False)])
def test_values_that_do_not_fit_or_that_nobody_needs_stay_as_they_are(
    first: int, columns: int, used: bool
) -> None:
    """The receiver reports the shape that it got."""
    reader = DequantizedWeights(
        lambda name: (256, 128) if name == "w" else None, lambda *_: None, lambda name: used
    )
    piece = WEIGHT[:, :columns]
    ((_, found, *_rest),) = reader.dequantize([("w_scale_inv", torch.ones(2, 1)), ("w", piece, first)])
    assert found is piece
