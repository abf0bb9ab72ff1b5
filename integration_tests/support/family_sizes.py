"""Models of all families that are not tiny, as ``config.json``."""

import json
from typing import Any

import tiny_hf
import transformers

LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "longcat_flash",
    "mistral4",
    "youtu",
)
WHOLE: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
}
WHOLE |= {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
PARTS: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 512),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "sliding_window", "index_topk"), 256),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 32),
    **{"q_lora_rank": 192, "linear_num_value_heads": 8, "max_window_layers": 2},
}
"""Sizes at which layers count, where a family has them."""


def described(case: str) -> dict[str, Any]:
    """``config.json`` of a case of `tiny_hf` that is not tiny."""
    model_type, different = tiny_hf.ALL[case]
    sizes = {**tiny_hf.SIZE, **WHOLE, **different}
    sizes |= {name: size for name, size in PARTS.items() if sizes.get(name) is not None}
    if model_type in LATENT:
        sizes |= {"head_dim": 32, "num_key_value_heads": 8}
    elif "head_dim" in different:
        sizes["head_dim"] = 64
    if sizes.get("hidden_size_per_layer_input"):
        sizes |= {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": sizes["vocab_size"]}
    if model_type in ("mamba", "falcon_mamba"):
        sizes["num_hidden_layers"] = 2  # a scan of fake tensors is many calls
    if model_type == "mamba2":
        sizes["num_heads"] = 2 * sizes["hidden_size"] // sizes["head_dim"]
    if model_type == "mimo_v2_flash":
        sizes |= {"head_dim": 192, "v_head_dim": 128}
    if "long_factor" in (rope := sizes.get("rope_parameters", {})):
        pairs = (sizes["qk_rope_head_dim"] if "qk_rope_head_dim" in sizes else sizes["head_dim"]) // 2
        factors = {name: (rope[name] * pairs)[:pairs] for name in ("short_factor", "long_factor")}
        sizes["rope_parameters"] = {**rope, **factors}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    found["architectures"] = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return found
