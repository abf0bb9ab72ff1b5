"""Models of awkward sizes, and adapters on them, to draw from."""

import random
from typing import Any

from parity import _EXPERTS
from prediction import APART, NUMBERED
from reference import FAMILY_CASES
from test_lora_gradients import CASES as ADAPTED

NOT_DRAWN = frozenset({"exaone_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"})
"""Families with experts whose tensors have other names in files than in transformers' modules."""
UNDRAWN = frozenset(
    {
        *(
            "afmoe",
            "apertus",
            "aria_text",
            "cohere",
            "cohere2",
            "cohere2_moe",
        ),
        *(
            "deepseek_v32",
            "ernie4_5_moe",
            "falcon",
            "falcon-one-norm",
            "flex_olmo",
            "flint",
        ),
        *(
            "gemma4_text",
            "gemma4_unified_text",
            "glm_moe_dsa",
            "gpt_neox",
            "gpt_neox-sequential",
            "gptj",
        ),
        *(
            "granite_swa",
            "granitemoe_swa",
            "llama4_text",
            "mellum",
            "mimo_v2_flash",
            "ministral3",
        ),
        *(
            "mistral4",
            "nanochat",
            "olmo",
            "persimmon",
            "phi",
        ),
        *("bamba", "granitemoehybrid", "granitemoehybrid-dense"),
        *("nemotron_h", "nemotron_h-dense", "nemotron_h-latent"),
        *(
            "bloom",
            "gemma4_text-experts",
            "gpt2",
            "gpt_bigcode",
            "kimi_linear",
            "minicpm3",
            "olmo_hybrid",
            "opt",
        ),
    }
)
"""Families of which nobody has told yet which sizes go together."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu")
WHOLE_HEADS = ("arcee", "deepseek_v2", "internlm3", "iquestcoder", "jais2", "vaultgemma")
"""transformers asks of these that the heads divide the hidden size, which they need not fill."""
PREDICTING = {
    "deepseek_v3": NUMBERED,
    "deepseek_v3-no-q-lora": NUMBERED,
    "glm4_moe": NUMBERED,
    "glm4_moe_lite": NUMBERED,
    "qwen3_next": APART,
    "qwen3_5_text": APART,
    "qwen3_5_moe_text": APART,
}
"""Families with prediction layers, and what those are called."""
HEADS = ((4, 2), (4, 2), (4, 4), (4, 1), (8, 2), (8, 4), (12, 6), (6, 2), (6, 3), (3, 1), (5, 5))
TYPES = ("mlp_layer_types", "layer_types")


def is_sparse(base: str) -> bool:
    """Whether the model of ``base`` has experts."""
    return any(FAMILY_CASES[base][1].get(key) for key in _EXPERTS)


def sizes(rng: random.Random, base: str) -> dict[str, Any]:
    """What differs in ``config.json``."""
    kind, given = FAMILY_CASES[base]
    heads, groups = rng.choice(HEADS)
    layers = rng.choice((2, 3, 4, 4, 5))
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
    if kind in WHOLE_HEADS:
        found["hidden_size"] = 8 * heads
    if "linear_num_key_heads" in given:
        kinds = ("linear_attention", "linear_attention", "full_attention")
        found["layer_types"] = [*(rng.choice(kinds) for _ in range(layers - 1)), "full_attention"]
    found |= {
        name: [given[name][i % len(given[name])] for i in range(layers)] for name in TYPES if name in given
    }
    return found | (_experts(rng, given) if is_sparse(base) else {})


def _experts(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    count = rng.choice((4, 4, 6, 8))
    found = {name: count for name in _EXPERTS if name in given}
    found["num_experts_per_tok"] = rng.choice((2, 2, 3, 1))
    if "moe_intermediate_size" in given:
        found["moe_intermediate_size"] = rng.choice((16, 12, 20))
    if "n_group" in given:
        found["n_group"], found["topk_group"] = rng.choice(((2, 1), (2, 2), (1, 1)))
    return found


def prediction_layers(rng: random.Random, base: str) -> int:
    """Of families that have them; Qwen's have one at most."""
    if base not in PREDICTING:
        return 0
    return min(rng.choice((0, 1, 1, 2)), 1 if PREDICTING[base] is APART else 2)


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
