"""Models of awkward sizes, and adapters on them, to draw from."""

import math
import random
from typing import Any

from lora_cases import CASES as ADAPTED
from parity import _EXPERTS
from prediction import APART, MIMO, NUMBERED
from reference import FAMILY_CASES

LATENT = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_linear"),
    *("bailing_hybrid", "longcat_flash", "minicpm3", "mistral4", "youtu"),
)
WHOLE_HEADS = (
    *(
        "arcee",
        "aria_text",
        "deepseek_v2",
        "falcon",
        "gpt_bigcode",
        "gptj",
        "internlm3",
        "iquestcoder",
        "jais2",
    ),
    *("minicpm3", "vaultgemma"),
)
"""transformers asks of these that the heads divide the hidden size, which they need not fill."""
IN_PAIRS = ("longcat_flash",)
"""Families of which a layer counts for two."""
PREDICTING = {
    "deepseek_v3": NUMBERED,
    "deepseek_v3-no-q-lora": NUMBERED,
    "deepseek_v32": NUMBERED,
    "glm4_moe": NUMBERED,
    "glm4_moe_lite": NUMBERED,
    "glm_moe_dsa": NUMBERED,
    "mimo": MIMO,
    "qwen3_next": APART,
    "qwen3_5_text": APART,
    "qwen3_5_moe_text": APART,
}
"""Families with MTP layers, and what those are called."""
HEADS = ((4, 2), (4, 2), (4, 4), (4, 1), (8, 2), (8, 4), (12, 6), (6, 2), (6, 3), (3, 1), (5, 5))
ALWAYS_LONG = {"original_max_position_embeddings": 1, "attention_factor": 1.1}
"""The longest of a pack decides which frequencies all its samples have; the truth takes each sample alone."""
BY_LAYER = ("mlp_layer_types", "layer_types", "layer_rope_theta", "layers_block_type", "no_rope_layers")


def is_sparse(base: str) -> bool:
    """Return True if the model of ``base`` has experts."""
    return any(FAMILY_CASES[base][1].get(key) for key in _EXPERTS)


def sizes(rng: random.Random, base: str) -> dict[str, Any]:
    """Return the differences in ``config.json``."""
    kind, given = FAMILY_CASES[base]
    heads, groups = rng.choice(HEADS)
    layers = rng.choice((2, 3, 4, 4, 5))
    if kind in IN_PAIRS:
        layers *= 2
    found: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kind in LATENT else groups,
        "vocab_size": rng.choice((70, 64, 67, 101)),
        "hidden_size": rng.choice((32, 24, 40)),
        "intermediate_size": rng.choice((48, 36, 40)),
    }
    if kind not in LATENT:
        square = "head_dim" in given  # families whose heads fill the hidden size
        found["head_dim"] = 8 if square else rng.choice((16, 8, 12, 24))
        if square:
            found["hidden_size"] = 8 * heads
    if "num_kv_heads" in given:
        found["num_kv_heads"] = groups
    if "index_block_size" in given:
        found["index_n_heads"] = groups  # one for each
    if kind in WHOLE_HEADS:
        found["hidden_size"] = 8 * heads
    if "linear_num_key_heads" in given:
        kinds = ("linear_attention", "linear_attention", "full_attention")
        found["layer_types"] = [*(rng.choice(kinds) for _ in range(layers - 1)), "full_attention"]
    found |= {
        name: [given[name][i % len(given[name])] for i in range(layers)] for name in BY_LAYER if name in given
    }
    found |= _states(rng, given, layers)
    found |= _mixer(given, found)
    if given.get("hidden_size_per_layer_input"):
        found |= _beside_hidden(rng, found)
    if given.get("rope_parameters", {}).get("rope_type") == "longrope":
        found["rope_parameters"] = {**given["rope_parameters"], **ALWAYS_LONG}
    return found | (_experts(rng, given) if is_sparse(base) else {})


def _beside_hidden(rng: random.Random, found: dict[str, Any]) -> dict[str, Any]:
    """Return sizes of families with per-layer embeddings or shared KV; two layers project their own."""
    shared = bool(rng.choice((0, 0, 1)))
    return {
        "hidden_size_per_layer_input": rng.choice((6, 6, 8, 5, 0)),
        "vocab_size_per_layer_input": found["vocab_size"],
        "num_kv_shared_layers": rng.randint(0, found["num_hidden_layers"] - 2),
        "use_double_wide_mlp": bool(rng.choice((0, 1))),
        "attention_k_eq_v": shared,
        **({"num_global_key_value_heads": found["num_key_value_heads"]} if shared else {}),
    }


def _states(rng: random.Random, given: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the sizes of families with state space layers."""
    groups = next((name for name in ("mamba_n_groups", "n_groups") if name in given), None)
    if groups is None:
        return {}
    found: dict[str, Any] = {groups: rng.choice((1, 2, 4, 8))}
    if pattern := given.get("hybrid_override_pattern"):
        found["hybrid_override_pattern"] = "".join(pattern[i % len(pattern)] for i in range(layers))
    if "attn_layer_indices" in given:
        found["attn_layer_indices"] = [i for i in given["attn_layer_indices"] if i < layers]
    return found


def _mixer(given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of families with a mixer alone in each layer, twice as wide as the residual."""
    if "state_size" not in given:
        return {}
    inside, heads = 2 * found["hidden_size"], 2 * found["num_attention_heads"]
    groups = (
        {"num_heads": heads, "n_groups": math.gcd(heads, found["n_groups"])} if "n_groups" in found else {}
    )
    return {"intermediate_size": inside, **groups}


def _experts(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    count = rng.choice((4, 4, 6, 8))
    found = {name: count for name in _EXPERTS if name in given}
    found["num_experts_per_tok"] = 1 if given.get("num_experts_per_tok") == 1 else rng.choice((2, 2, 3, 1))
    if "moe_intermediate_size" in given:
        found["moe_intermediate_size"] = rng.choice((16, 12, 20))
    if given.get("n_group", 1) > 1:
        found["n_group"], found["topk_group"] = rng.choice(((2, 1), (2, 2), (1, 1)))
    return found


def prediction_layers(rng: random.Random, base: str) -> int:
    """Return the sizes of families with MTP layers; Qwen and MiMo have at most one."""
    if base not in PREDICTING:
        return 0
    return min(rng.choice((0, 1, 1, 2)), 2 if PREDICTING[base] is NUMBERED else 1)


def adapter(rng: random.Random, base: str) -> dict[str, Any] | None:
    """Some of what the family's adapters target; None where there is no such list."""
    known = [
        settings for name, settings in ADAPTED.values() if name.partition("-")[0] == base.partition("-")[0]
    ]
    if not known:
        return None
    settings = dict(rng.choice(known))
    for name in ("target_modules", "target_parameters"):
        if name in settings:
            settings[name] = rng.sample(settings[name], rng.randint(1, len(settings[name])))
    if rng.random() < 0.3:
        settings["use_rslora"] = True
    if rng.random() < 0.15 and "tied" not in base and "gemma" not in base:
        settings["modules_to_save"] = ["lm_head"]
    return settings | {"r": rng.choice((1, 3, 4)), "lora_alpha": rng.choice((1, 3))}
