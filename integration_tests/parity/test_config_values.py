"""Values of ``config.json`` that no family's own case has: computed as transformers does, or refused; never otherwise.

    MCA_TEST_CONFIGS=1000 .venv/bin/pytest integration_tests/parity/test_config_values.py

draws so many models instead of a few; each takes about 0.06 s. ``MCA_TEST_SEED`` draws others.
"""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reference
from harness import run_ranks
from layouts import arguments
from reference import FAMILY_CASES, Reference, make_reference
from routing import compare

pytestmark = pytest.mark.ranks

COUNT = int(os.environ.get("MCA_TEST_CONFIGS", "60"))
SEED = int(os.environ.get("MCA_TEST_SEED", "2026"))
TOLERANCE = 1e-4
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
FULL, SLIDING = "full_attention", "sliding_attention"
NESTED_ROPE = (
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "lfm3",
    "mellum",
    "mimo_v2_flash",
    "olmo3",
)
OWN_ROPE = (*NESTED_ROPE, "phi3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
QUERY_LORA = ("axk1", "deepseek_v32", "glm_moe_dsa", "longcat_flash")  # their q_lora_rank cannot be None
FROM_HIDDEN = ("olmo2", "olmo3", "olmoe", "granite", "smollm3", "phi3", "helium")  # no head_dim of their own
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    YARN,
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 2.0},
    {**YARN, "truncate": False},
)
LATENT_YARNS = ({**YARN, "mscale": 0.7}, {**YARN, "mscale_all_dim": 0.7}, {**YARN, "attention_factor": 1.7})
WHOLE_HEADS = ("llama", "mistral", "qwen3_moe", "gpt_oss", "exaone4", "deepseek_v3")
"""Families that rotate whole heads: transformers ignores a part that ``config.json`` names."""
GROUPS = ((2, 1, 3), (2, 1, 4), (4, 2, 2), (2, 2, 2))
"""Groups, those kept and experts for each token; the sum of two best is chosen by in all."""
# of the models whose configuration has the first key: what may stand under the others
CHOICES: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    ("rms_norm_eps", {"rms_norm_eps": (1e-6, 1e-2), "tie_word_embeddings": (True, False)}),
    ("rms_norm_eps", {"max_position_embeddings": (16, 64)}),
    ("kv_lora_rank", {"q_lora_rank": (None, 8), "v_head_dim": (4, 16)}),
    ("n_routed_experts", {"n_routed_experts": (4, 8), "n_shared_experts": (1, 2), "n_group": (1, 2)}),
    ("n_routed_experts", {"routed_scaling_factor": (1.0, 2.5), "first_k_dense_replace": (0, 2)}),
    ("n_routed_experts", {"num_experts_per_tok": (1, 2, 3)}),
    ("num_experts", {"num_experts_per_tok": (1, 2, 3), "norm_topk_prob": (True, False)}),
    ("num_local_experts", {"num_experts_per_tok": (1, 2, 3)}),
)
OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen2_moe": {"decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [1, 2])},
    "glm4_moe": {"use_qk_norm": (True, False), "attention_bias": (True, False)},
    "seed_oss": {"attention_bias": (True, False)},
    "gemma2": {"attn_logit_softcapping": (None, 1.0), "final_logit_softcapping": (None, 1.0)},
    "smollm3": {"no_rope_layers": ([1, 0, 1, 1], [0, 0, 0, 0])},
}
WINDOWED = ("mistral", "mixtral", "cwm", "gpt_oss", "gemma2", "gemma3_text", "olmo3", "exaone4", "phi3")
MIXED = ("cwm", "gpt_oss", "gemma2", "gemma3_text", "olmo3")
SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def drawn(kind: str, base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Some keys with other values."""
    full = {**reference.SIZE, **base}
    known = {key: values for has, some in CHOICES if has in full for key, values in some.items()}
    known |= OF_FAMILY.get(kind, {})
    if kind in QUERY_LORA:
        known["q_lora_rank"] = (8, 16)
    if "kv_lora_rank" not in full:
        known |= {"num_key_value_heads": (1, 2, 4)} | (
            {} if kind in FROM_HIDDEN else {"head_dim": (8, 16, 32)}
        )
    if kind in WINDOWED and full.get("sliding_window"):
        known["sliding_window"] = (3, 7, 30)
    if kind in MIXED:
        known["layer_types"] = ([FULL] * 4, [SLIDING] * 4, [FULL, SLIDING, SLIDING, FULL])
    different = {key: rng.choice(values) for key, values in known.items() if rng.random() < 0.4}
    if kind not in OWN_ROPE and rng.random() < 0.6:
        different["rope_parameters"] = {"rope_theta": rng.choice((100.0, 5e5)), **rng.choice(ROPES)}
    if kind in NESTED_ROPE and rng.random() < 0.6:
        different["rope_parameters"] = {
            FULL: {"rope_theta": rng.choice((100.0, 5e5)), **rng.choice(ROPES)},
            SLIDING: {"rope_theta": rng.choice((100.0, 1e4)), "rope_type": "default"},
        }
    if kind in SWITCHED and rng.random() < 0.4:
        different |= {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": rng.choice((1, 3)),
        }
    return different


def models() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, family's case and changes of every model: what once was computed wrongly, then random ones."""
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    yield "windows-qwen3_moe", "qwen3_moe", windows
    yield "windows-qwen2_moe", "qwen2_moe", windows
    for case in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"):
        yield f"one-expert-{case}", case, {"num_experts_per_tok": 1}
    for case in ("deepseek_v3", "glm4_moe"):
        for groups, kept, topk in GROUPS:
            choice = {
                "n_routed_experts": 8,
                "n_group": groups,
                "topk_group": kept,
                "num_experts_per_tok": topk,
            }
            yield f"groups-{groups}-{kept}-{topk}-{case}", case, choice
    for number, rope in enumerate((*ROPES, *LATENT_YARNS)):
        yield (
            f"rope-{rope['rope_type']}-{number}",
            "deepseek_v3",
            {"rope_parameters": {"rope_theta": 100.0, **rope}},
        )
    half = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    for case in WHOLE_HEADS:
        yield f"half-{case}", case, {"rope_parameters": half}
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    for case in ("minimax_m3_vl_text", "deepseek_v32"):  # their indexers rotate, too
        yield (
            f"dynamic-{case}",
            case,
            {"max_position_embeddings": 16, "rope_parameters": dynamic},
        )
    rng = random.Random(SEED)
    for number in range(COUNT):
        case = rng.choice(sorted(FAMILY_CASES))
        yield f"drawn-{number}", case, drawn(*FAMILY_CASES[case], rng)


def computed(references: list[Reference]) -> dict[str, str]:
    """Return the outcome for each model: ``same``, ``refused: ...`` or the difference. Runs on one rank."""
    from mca_config.errors import McaError
    from mca_models.megatron import AutoModel

    found = {}
    for each in references:
        try:
            compared = compare(AutoModel.from_pretrained(each.path, arguments("tp1")), each)
        except McaError as error:
            found[each.model] = f"refused: {error}"
            continue
        limit = TOLERANCE * max(1.0, float(each.logits.abs().max()))
        right = math.isfinite(compared.difference) and compared.difference <= limit
        found[each.model] = (
            "same" if right and not compared.misrouted else f"{compared.difference} {compared.problem()}"
        )
    return found


def of_transformers(name: str, folder: Path) -> Reference | None:
    """Return the logits of transformers; None if a drawn model fails there, because its keys contradict each other."""
    try:
        return make_reference(name, folder)
    except Exception:  # transformers refuses values, or fails, in ways of its own
        if not name.startswith("drawn"):
            raise
        return None


@pytest.mark.qualify
def test_every_value_is_computed_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {}
    for name, case, different in models():
        kind, base = FAMILY_CASES[case]
        fixed = {"head_dim": 4} if "kv_lora_rank" in base else {}
        monkeypatch.setitem(reference.CASES, name, (kind, {**base, **fixed, **different}))
        changed[name] = (case, different)
    references = [made for name in changed if (made := of_transformers(name, tmp_path)) is not None]
    assert len(changed) - len(references) <= COUNT / 10  # what transformers itself cannot compute
    (found,) = run_ranks(1, computed, references, timeout=max(500, COUNT))
    wrong = {
        name: (*changed[name], what) for name, what in found.items() if what[:7] not in ("same", "refused")
    }
    assert not wrong
    assert [what for name, what in found.items() if name.startswith("windows")] == ["same", "same"]
    assert {what for name, what in found.items() if name.startswith(("groups", "rope-yarn", "half"))} == {
        "same"
    }
    assert all("top-k attention" in found[name] for name in found if name.startswith("dynamic"))
    for name in (name for name in found if name.startswith("one-expert")):
        assert "num_experts_per_tok" in found[name], name
    assert sum(what == "same" for what in found.values()) > COUNT / 2
