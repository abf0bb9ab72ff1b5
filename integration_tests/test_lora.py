"""LoRA on Megatron's linears computes, trains and saves what ``peft`` does on the HF model."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import run_ranks
from layouts import arguments, world_size
from lora_training import adapter_of, loaded_logits, tokens, train_megatron
from parity import is_sparse
from reference import make_reference

pytestmark = pytest.mark.ranks

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"k_proj": 2},
    "alpha_pattern": {"up_proj": 5},
    "use_rslora": True,
}

# name -> (case of reference.py, settings of LoraConfig)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"target_modules": LINEAR, **PATTERNS}),
    "qwen2-tied-qv": ("qwen2-tied", {"target_modules": ["q_proj", "v_proj"]}),
    "llama-saved": (
        "llama",
        {"target_modules": ["up_proj", "o_proj"], "modules_to_save": ["lm_head", "model.norm"]},
    ),
    "llama-one-group": ("llama-one-group", {"target_modules": LINEAR[:4]}),
    "qwen3_moe": ("qwen3_moe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    # for these families peft takes the projections of shared experts by target_parameters only
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["q_proj"], "target_parameters": [*SHARED, *STACKED[:1]]}),
    "qwen2_moe-bare": (
        "qwen2_moe",
        {"target_modules": ["shared_expert_gate"], "target_parameters": ["gate.weight", STACKED[1]]},
    ),
    "mixtral": ("mixtral", {"target_modules": ["o_proj"], "target_parameters": STACKED}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": LATENT, "target_parameters": STACKED}),
    "glm4_moe_lite": ("glm4_moe_lite", {"target_modules": LATENT, "target_parameters": STACKED}),
    "minimax_m2": ("minimax_m2", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "gemma2": ("gemma2", {"target_modules": LINEAR, **PATTERNS}),
    "olmo3": ("olmo3", {"target_modules": LINEAR}),
}
DENSE_LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "pp2vpp2", "tp2pp2", "tp2pp2sp", "cp2", "tp2cp2sp")
EXPERT_LAYOUTS = ("tp1", "ep2", "pp2", "tp2ep2etp1sp", "tp2ep2etp2sp", "pp2ep2", "cp2ep2")
ALL_PAIRS = [
    (number + place, case, layout)
    for number, (case, (base, _)) in enumerate(CASES.items())
    for place, layout in enumerate(EXPERT_LAYOUTS if is_sparse(base) else DENSE_LAYOUTS)
]
EVERY = bool(os.environ.get("MCA_EVERY_LORA"))  # else each case on a third of the layouts
PAIRS = [(case, layout) for number, case, layout in ALL_PAIRS if EVERY or number % 3 == 0]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Base directory and what peft makes of a case."""
    folder: Path = tmp_path_factory.mktemp("lora")

    @cache
    def of_case(name: str) -> tuple[Path, dict[str, Any]]:
        case, settings = CASES[name]
        base = make_reference(case, folder).path
        return base, adapter_of(base, folder / name, settings)

    return of_case


def run_case(base: Path, adapter: Path, layout: str, saved: Path) -> dict[str, torch.Tensor]:
    """Logits of one adapter on one layout before and after training. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    models = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter)
    found = {"before": models.logits(tokens())}
    models.merge_adapter()
    found["merged"] = models.logits(tokens())
    models.unmerge_adapter()
    found["unmerged"] = models.logits(tokens())
    train_megatron(models)
    found["after"] = models.logits(tokens())
    models.save_pretrained(saved / "mca")
    models.save_pretrained_as_hf(saved / "peft")
    plain = models.merge_and_unload()
    found["unloaded"] = plain.logits(tokens())
    again = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), saved / "mca")
    found["loaded"] = again.logits(tokens())
    return found


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_training_equals_peft(
    case: str, layout: str, references: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    base, theirs = references(case)
    by_rank = run_ranks(world_size(layout), run_case, base, theirs["adapter"], layout, tmp_path)
    assert float((theirs["after"] - theirs["before"]).abs().max()) > 0.05
    for found in by_rank:
        for name in ("before", "merged", "unmerged"):
            assert float((found[name] - theirs["before"]).abs().max()) <= TOLERANCE, name
        for name in ("after", "unloaded", "loaded"):
            assert float((found[name] - theirs["after"]).abs().max()) <= 10 * TOLERANCE, name
        assert torch.equal(found["unmerged"], found["before"])
    reloaded = loaded_logits(base, tmp_path / "peft")
    assert float((reloaded - theirs["after"]).abs().max()) <= 10 * TOLERANCE
    ours, reference = (
        load_file(f / "adapter_model.safetensors") for f in (tmp_path / "peft", theirs["trained"])
    )
    assert ours.keys() == reference.keys()
