"""Casts of tensors round once, as those of the converter do."""

import pytest
import torch

from mca_models.megatron.tensors import cast_finite, copy_finite

HALFWAY = 1 + 2**-8 + 2**-30
"""In fp32 halfway between two numbers of bf16, in fp64 nearer to the larger one."""


@pytest.mark.parametrize("values", [[HALFWAY, -HALFWAY, 2.0, float("inf")]])
def test_fp64_is_rounded_to_bf16_once(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float64)
    target = torch.empty(len(values), dtype=torch.bfloat16)
    copy_finite(target, source, "weight")
    assert target.tolist() == [1 + 2**-7, -1 - 2**-7, 2.0, float("inf")]
    assert torch.equal(cast_finite(source, torch.bfloat16, "weight"), target)
