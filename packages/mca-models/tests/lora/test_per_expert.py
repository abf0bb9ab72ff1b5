"""Factors of stacked experts as those of each expert's linears, against the changes of the stacked parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from safetensors.torch import load_file

from mca_config.errors import McaError
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import open_adapter
from mca_models.lora.peft_directory import per_expert_config, per_expert_tensors, require_per_expert

PARTS = {
    "qwen3_moe": {"base_layer.": ("gate_proj", "up_proj"), "": ("down_proj",)},
    "mixtral-down": {"": ("w2",)},
}
"""Linears of an expert by the stacked parameter whose rows they are, one below the other."""


@pytest.mark.parametrize("case", PARTS)
def test_the_factors_of_each_expert_multiply_to_its_change(case: str, tmp_path: Path) -> None:
    base, source = adapters.save(case, tmp_path)
    adapter = open_adapter(source, open_checkpoint(base).config)
    theirs = load_file(source / "adapter_model.safetensors")
    found = {name: torch.from_numpy(array) for name, array in per_expert_tensors(adapter)}
    count = adapter.model.num_experts
    assert count
    for name in [name for name in theirs if ".experts." not in name]:
        assert torch.equal(found.pop(name), theirs[name]), name
    compared = 0
    for name in [name for name in theirs if ".experts." in name and name.endswith("lora_A.weight")]:
        owner, _, rest = name.partition(".experts.")
        parts = PARTS[case][rest.removesuffix("lora_A.weight")]
        a, b = theirs[name], theirs[name.replace("lora_A", "lora_B")]
        changes = torch.einsum("ore,eri->eoi", b.view(len(b), -1, count), a.view(count, -1, a.shape[1]))
        for expert in range(count):
            own = [f"{owner.replace('.mlp', MOE[case])}.experts.{expert}.{part}.lora_" for part in parts]
            pairs = [(found.pop(f"{each}B.weight"), found.pop(f"{each}A.weight")) for each in own]
            assert all(torch.equal(pair[1], pairs[0][1]) for pair in pairs)
            change = torch.cat([each_b @ each_a for each_b, each_a in pairs])
            torch.testing.assert_close(change, changes[expert], rtol=0, atol=1e-6)  # sums of 3 products
            compared += 1
    assert not found and compared >= 4


MOE = {"qwen3_moe": ".mlp", "mixtral-down": ".block_sparse_moe"}


@pytest.mark.parametrize(
    ("case", "modules"),
    [
        ("mixtral-down", ["q_proj", "w2"]),
        ("deepseek_v3", [*adapters.LATENT, "gate_proj", "up_proj", "down_proj"]),
        ("qwen2", None),
    ],
)
def test_the_linears_of_experts_are_target_modules(
    case: str, modules: list[str] | None, tmp_path: Path
) -> None:
    base, source = adapters.save(case, tmp_path)
    adapter = open_adapter(source, open_checkpoint(base).config)
    document = json.loads((source / "adapter_config.json").read_text())
    found = per_expert_config(document, adapter.rules, adapter.model)
    require_per_expert(adapter.rules, adapter.model)
    if modules is None:
        assert found is document
        return
    assert sorted(found["target_modules"]) == sorted(modules)
    assert found == {**document, "target_modules": found["target_modules"], "target_parameters": None}


def test_experts_of_several_ranks_or_without_linears_are_errors(tmp_path: Path) -> None:
    base, source = adapters.save("qwen3_moe", tmp_path)
    adapter = open_adapter(source, open_checkpoint(base).config)
    document: dict[str, Any] = {}
    with pytest.raises(McaError, match=r"^per_expert: experts have several ranks or alphas"):
        per_expert_config(document, adapter.rules, adapter.model)
    factors = [
        replace(pair, rank=3, scale=2.0 if pair.target.stacked else 9.0) for pair in adapter.rules.factors
    ]
    per_expert_config(document, replace(adapter.rules, factors=tuple(factors)), adapter.model)
    others = [replace(factors[-1], scale=1.0), *factors]
    with pytest.raises(McaError, match=r"^per_expert: experts have several ranks or alphas"):
        per_expert_config(document, replace(adapter.rules, factors=tuple(others)), adapter.model)
    stacked = replace(adapter.model, model_type="gpt_oss")
    with pytest.raises(McaError, match=r"^per_expert: gpt_oss checkpoints have stacked experts \(decoder"):
        require_per_expert(adapter.rules, stacked)
