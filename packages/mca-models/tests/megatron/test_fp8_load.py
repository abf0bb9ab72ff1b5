"""Scales of fp8 weights that come in pieces."""

import pytest
import torch

from mca_models.megatron.state import fp8_export
from mca_models.megatron.state.fp8_load import DequantizedWeights

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
    values, scales = fp8_export.quantised("name", weight)
    monkeypatch.setattr(fp8_export, "_STEP", elements)
    again = fp8_export.quantised("name", weight)
    assert torch.equal(again[0].float(), values.float()) and torch.equal(again[1], scales)
