"""Gradients of every adapter tensor equal those of ``peft`` on the HF model, for every family."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch

from harness import run_ranks
from layouts import EVERY, Pair, arguments, by_layout, sample, selected, spread, tiered, world_size
from lora_training import adapter_of, megatron_gradients, peft_gradients, tokens
from mca_models.templates import FAMILIES
from parity import is_sparse
from reference import CASES as REFERENCES
from reference import make_reference
from test_lora import CASES as TRAINED
from test_lora import LATENT, LINEAR, STACKED

pytestmark = pytest.mark.ranks

DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "shared_expert_gate"]
PER_LAYER = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
KIMI_GATES = ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
DELTA_3_5 = ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "up_proj"]
ALL: dict[str, Any] = {"target_modules": LINEAR}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **TRAINED,
    "cwm": ("cwm", ALL),
    "deepseek_v2": ("deepseek_v2", {"target_modules": LATENT, "target_parameters": STACKED}),
    "exaone4": ("exaone4", ALL),
    "gemma3_text": ("gemma3_text", ALL),
    "glm4": ("glm4", {"target_modules": [*LINEAR[:4], "gate_up_proj", "down_proj"]}),
    "glm4_moe": ("glm4_moe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "gpt_oss": ("gpt_oss", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "granite": ("granite", {"target_modules": [*LINEAR, "lm_head"]}),  # the model divides its logits
    "mistral": ("mistral", ALL),
    "nemotron_h": (
        "nemotron_h",
        {
            "target_modules": ["in_proj", *LINEAR[:4], "shared_experts.up_proj", "3.mixer.down_proj"],
            "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
        },
    ),
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
LAYOUTS = ("tp2pp2", "tp1", "tp2cp2sp") if EVERY else ("pp2", "tp1", "tp2sp", "tp2pp2", "cp2")
EXPERT_LAYOUTS = ("cp2ep2", "tp1", "tp2ep2etp1sp")
SPARSE = [case for case, (_, settings) in CASES.items() if settings.get("target_parameters")]
GRID = spread([case for case in CASES if case not in SPARSE], LAYOUTS) + spread(SPARSE, EXPERT_LAYOUTS)
EXPERTS: dict[str, Any] = {"target_modules": LINEAR[:4], "target_parameters": STACKED}
FUSED_MLP: dict[str, Any] = {"target_modules": [*LINEAR[:4], "gate_up_proj", "down_proj"]}
NO_GATE: dict[str, Any] = {"target_modules": [*LINEAR[:4], "up_proj", "down_proj"]}
FUSED_QKV: dict[str, Any] = {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}
HALVES = ["mlps.0.up_proj.weight", "mlps.1.down_proj.weight"]
BLOCK = [name.replace("mlp.", "block_sparse_moe.") for name in STACKED]
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (case, EXPERTS if is_sparse(case) else ALL) for case in tiny_hf.ALIKE},
    "glm": ("glm", FUSED_MLP),
    "granitemoe": ("granitemoe", {"target_modules": LINEAR[:4], "target_parameters": BLOCK}),
    "granitemoeshared": ("granitemoeshared", {"target_modules": ["o_proj", "input_linear", "output_linear"]}),
    "hy_v3": (
        "hy_v3",
        {"target_modules": ["o_proj", "shared_experts.up_proj"], "target_parameters": STACKED},
    ),
    **{case: (case, NO_GATE) for case in ("arcee", "nemotron", "jais2")},
    "starcoder2": ("starcoder2", {"target_modules": [*LINEAR[:4], "c_fc", "c_proj"]}),
    "kimi_k2": ("kimi_k2", {"target_modules": LATENT, "target_parameters": STACKED}),
    "youtu": ("youtu", {"target_modules": [*LATENT, *LINEAR[4:]]}),
    "apertus": ("apertus", NO_GATE),
    "nanochat": ("nanochat", {"target_modules": [*LINEAR[:4], "fc1", "fc2", "lm_head"]}),  # capped logits
    **{case: (case, FUSED_QKV) for case in ("persimmon", "gpt_neox", "gpt_neox-sequential")},
    **{case: (case, FUSED_QKV) for case in ("bloom", "falcon", "falcon-one-norm")},
    "phi": ("phi", {"target_modules": [*LINEAR[:3], "dense", "fc1", "fc2"]}),
    "gptj": ("gptj", {"target_modules": [*LINEAR[:3], "out_proj", "fc_in", "fc_out"]}),
    "granitemoe_swa": ("granitemoe_swa", {"target_modules": LINEAR[:4], "target_parameters": BLOCK}),
    "bamba": ("bamba", {"target_modules": ["in_proj", "out_proj", *LINEAR]}),
    "falcon_h1": ("falcon_h1", {"target_modules": ["in_proj", *LINEAR, "lm_head"]}),
    "falcon_h1-norm": ("falcon_h1-norm", {"target_modules": ["in_proj", *LINEAR]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "output_linear"], "target_parameters": BLOCK},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid-dense",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "input_linear", "output_linear"]},
    ),
    **{case: (case, {"target_modules": ["c_attn", "c_fc", "c_proj"]}) for case in ("gpt2", "gpt_bigcode")},
    "gemma4_text-e2b": ("gemma4_text-e2b", {"target_modules": [*LINEAR, *PER_LAYER]}),
    "gemma4_text-experts": (
        "gemma4_text-experts",
        {
            "target_modules": [*LINEAR[:4], "mlp.up_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "opt": ("opt", {"target_modules": [*LINEAR[:3], "out_proj", "fc1", "fc2"]}),
    "minicpm3": ("minicpm3", {"target_modules": [*LATENT, *LINEAR[4:]]}),
    # as those of shared experts: peft takes the projections of MLPs by target_parameters only
    "longcat_flash": ("longcat_flash", {"target_modules": LATENT, "target_parameters": [*STACKED, *HALVES]}),
    "olmo_hybrid": ("olmo_hybrid", {"target_modules": [*LINEAR, "a_proj", "b_proj", "g_proj"]}),
    "kimi_linear": (
        "kimi_linear",
        {
            "target_modules": [*LATENT[:1], "b_proj", *KIMI_GATES, "q_proj", "kv_b_proj", "o_proj"],
            "target_parameters": STACKED,
        },
    ),
    "llama4_text": ("llama4_text", {"target_modules": [*LINEAR[:4], "shared_expert.up_proj"]}),
    "minimax_m3_vl_text": (  # the indexer has linears of the same last names
        "minimax_m3_vl_text",
        {
            "target_modules": [
                *(f"self_attn.{name}" for name in LINEAR[:4]),
                *("shared_experts.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
            ],
            "target_parameters": STACKED,
        },
    ),
}
CASES |= ALIKE
# by default those that name a linear otherwise than others
BY_NAME = sample(
    ALIKE,
    *(
        "falcon",
        "gemma4_text-e2b",
        "glm",
        "gpt2",
        "granitemoe",
        "granitemoeshared",
        "hy_v3",
        "kimi_linear",
        "minimax_m3_vl_text",
        "phi",
    ),
)
GRID += spread([case for case in BY_NAME if not is_sparse(case)], LAYOUTS if EVERY else ("tp2sp",))
GRID += spread([case for case in BY_NAME if is_sparse(case)], EXPERT_LAYOUTS)
RESEMBLING = (
    "cwm",
    "exaone4",
    "mistral",
    "seed_oss",
    "smollm3",
    "olmoe",
    "glm4_moe_lite",
    "minimax_m2",
)
RESEMBLING += (
    ()
    if EVERY
    else (
        *("deepseek_v2", "glm", "glm4", "granitemoe", "granitemoeshared", "hy_v3", "olmo3", "phi", "phi3"),
        *("falcon", "gemma2", "glm4_moe", "olmo2", "qwen2_moe", "qwen2-tied-qv", "qwen3_moe"),
    )
)
WIDE = [pair for pair in GRID if pair[0] in RESEMBLING]
TOLERANCE = 1e-4  # of the largest element of a tensor's gradient

Found = tuple[torch.Tensor, dict[str, torch.Tensor] | None] | str
"""Logits and gradients, or why there are none."""


def gradients(jobs: list[tuple[Path, Path, str]], **settings: Any) -> list[Found]:
    """Of each adapter on its base and layout. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    found: list[Found] = []
    for base, adapter, layout in jobs:
        try:
            models = load_adapter(AutoModel.from_pretrained(base, arguments(layout, **settings)), adapter)
            found.append((models.logits(tokens()), megatron_gradients(models)))
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


@dataclass(frozen=True)
class Expected:
    """What ``peft`` makes of a case."""

    base: Path
    adapter: Path
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def expected_of(case: str, folder: Path) -> Expected:
    """The adapter of ``case``, made under ``folder``."""
    base_case, settings = CASES[case]
    base = make_reference(base_case, folder).path
    theirs = adapter_of(base, folder / f"{case}-peft", settings, train=False)
    adapter = theirs["adapter"]
    return Expected(base, adapter, theirs["before"], peft_gradients(base, adapter))


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    folder = tmp_path_factory.mktemp("adapters")
    cases = dict.fromkeys(case for case, _ in selected(request, GRID))
    return {case: expected_of(case, folder) for case in cases}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, expected: dict[str, Expected]) -> dict[Pair, Found]:
    """What the factory makes of every case on every layout, as rank 0 has it."""
    made: dict[Pair, Found] = {}
    for layout, cases in by_layout(selected(request, GRID)).items():
        jobs = [(expected[case].base, expected[case].adapter, layout) for case in cases]
        of_first = run_ranks(world_size(layout), gradients, jobs, timeout=300)[0]
        made |= {(case, layout): each for case, each in zip(cases, of_first, strict=True)}
    return made


def test_every_family_is_here() -> None:
    text = {name for name, family in FAMILIES.items() if family.vision is None}  # others: test_vision_carried
    assert {REFERENCES[case][0] for case, _ in CASES.values()} == text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case,layout", tiered(GRID, *WIDE))
def test_gradients_equal_pefts(
    case: str, layout: str, expected: dict[str, Expected], found: dict[Pair, Found]
) -> None:
    assert_equal_pefts(expected[case], found[case, layout])


def assert_equal_pefts(theirs: Expected, ours: Found) -> None:
    assert not isinstance(ours, str), ours
    logits, gradients = ours
    assert float((logits - theirs.logits).abs().max()) < 1e-4
    assert gradients is not None
    assert gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((gradients[name] - gradient).abs().max()) < TOLERANCE * largest, name
