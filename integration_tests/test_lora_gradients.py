"""Gradients of every adapter tensor equal those of ``peft`` on the HF model, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from layouts import arguments, world_size
from lora_training import adapter_of, megatron_gradients, peft_gradients, tokens
from mca_models.templates import FAMILIES
from reference import CASES as REFERENCES
from reference import make_reference
from test_lora import CASES as TRAINED
from test_lora import LATENT, LINEAR, STACKED

pytestmark = pytest.mark.ranks

DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "shared_expert_gate"]
DELTA_3_5 = ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "up_proj"]
ALL: dict[str, Any] = {"target_modules": LINEAR}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **TRAINED,
    "cwm": ("cwm", ALL),
    "deepseek_v2": ("deepseek_v2", {"target_modules": LATENT, "target_parameters": STACKED}),
    "exaone4": ("exaone4", ALL),
    "gemma3_text": ("gemma3_text", ALL),
    "glm4_moe": ("glm4_moe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "gpt_oss": ("gpt_oss", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "granite": ("granite", ALL),
    "mistral": ("mistral", ALL),
    "olmo2": ("olmo2", ALL),
    "olmoe": ("olmoe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "qwen3": ("qwen3", ALL),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {"target_modules": [*DELTA_3_5[:5], "shared_expert_gate"], "target_parameters": STACKED},
    ),
    "qwen3_5_text": ("qwen3_5_text", {"target_modules": DELTA_3_5}),
    "qwen3_next": ("qwen3_next", {"target_modules": DELTA, "target_parameters": STACKED}),
    "seed_oss": ("seed_oss", ALL),
    "smollm3": ("smollm3", ALL),
}
LAYOUTS = ("tp1", "tp2pp2", "tp2cp2sp")
EXPERT_LAYOUTS = ("tp1", "cp2ep2", "tp2ep2etp1sp")
TOLERANCE = 1e-4  # of the largest element of a tensor's gradient


def gradients(base: Path, adapter: Path, layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    models = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter)
    return models.logits(tokens()), megatron_gradients(models)


def test_every_family_is_here() -> None:
    assert {REFERENCES[case][0] for case, _ in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_pefts(case: str, tmp_path: Path) -> None:
    base_case, settings = CASES[case]
    base = make_reference(base_case, tmp_path).path
    theirs = adapter_of(base, tmp_path, settings, train=False)
    expected = peft_gradients(base, theirs["adapter"])
    for layout in EXPERT_LAYOUTS if settings.get("target_parameters") else LAYOUTS:
        logits, found = run_ranks(world_size(layout), gradients, base, theirs["adapter"], layout)[0]
        assert float((logits - theirs["before"]).abs().max()) < 1e-4, layout
        assert found is not None
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            largest = float(gradient.abs().max())
            assert largest > 0
            assert float((found[name] - gradient).abs().max()) < TOLERANCE * largest, (layout, name)
