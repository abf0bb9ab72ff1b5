"""Casts of tensors round once, as those of the converter do."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_hf
import torch
from safetensors.torch import load_file, save_file

from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.megatron.factory.fill import rounded_names
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


@pytest.mark.parametrize(
    ("in_fp32", "rounded"),
    [((), []), (("model.norm.weight",), ["model.norm.weight"]), (None, [])],
    ids=["none", "one", "all"],
)
def test_tensors_in_fp32_among_others_are_named(
    in_fp32: tuple[str, ...] | None, rounded: list[str], tmp_path: Path
) -> None:
    path = tiny_hf.save("llama", tmp_path / "hf", "bfloat16")
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({k: v.float() if in_fp32 is None or k in in_fp32 else v for k, v in tensors.items()}, file)
    source = open_checkpoint(path)
    params = [(SimpleNamespace(param=param), torch.empty(0, dtype=torch.bfloat16)) for param in source.params]
    assert rounded_names(source, params) == rounded  # type: ignore[arg-type]
