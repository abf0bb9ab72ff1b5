"""Scales of fp8 weights that come in pieces."""

import torch

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
