"""Tiny random HF checkpoints of every supported family, made and saved by transformers itself."""

import json
from pathlib import Path
from typing import Any

import tiny_classes
import tiny_versions
import torch
import transformers
from tiny_newer import LATEST, NEWER
from tiny_sizes import BAMBA, DELTA_NET, EXPERTS, GROUPED, LATENT, MAMBA, OLD_GROUPS, SHARED, SIZE

# name -> (model_type, what differs from SIZE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True, "sliding_window": None}),
    "cwm": ("cwm", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", {**GROUPED, **LATENT}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**GROUPED, **LATENT, "head_dim": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "deepseek_v2": ("deepseek_v2", {**OLD_GROUPS, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v2-no-q-lora": ("deepseek_v2", {**OLD_GROUPS, **LATENT, "q_lora_rank": None}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **DELTA_NET, **SHARED, "mlp_only_layers": [1]}),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**EXPERTS, **DELTA_NET, **SHARED}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,  # low enough to bend the scores and logits of this size
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "glm4": ("glm4", {}),
    "olmo2": ("olmo2", {"head_dim": 8}),
    "olmo3": ("olmo3", {"head_dim": 8, "sliding_window": 8}),
    "phi3": ("phi3", {"head_dim": 8}),
    "granite": (
        "granite",
        {
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.4,
        },
    ),
    "smollm3": ("smollm3", {"head_dim": 8}),
    "exaone4": ("exaone4", {"sliding_window": 8}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "nemotron_h": (
        "nemotron_h",
        {
            **MAMBA,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        {
            **{**MAMBA, "hybrid_override_pattern": "*EME", "moe_latent_size": 12},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "nemotron_h-dense": ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "M-M*"}),
    "deepseek_v3-no-q-lora": ("deepseek_v3", {**GROUPED, **LATENT, "q_lora_rank": None}),
}
GRANITE: dict[str, Any] = CASES["granite"][1]
INDEXED: dict[str, Any] = {
    **{key: value for key, value in GROUPED.items() if key != "first_k_dense_replace"},
    **LATENT,
    **{"head_dim": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    **{"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8},
}
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    **NEWER,
    "kimi_k2": (
        "kimi_k2",
        {
            **{**GROUPED, **LATENT, "head_dim": 4},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "iquestcoder": ("iquestcoder", {}),
    "internlm3": ("internlm3", {}),
    "ministral": (
        "ministral",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma": ("gemma", {}),
    "vaultgemma": ("vaultgemma", CASES["gemma2"][1]),
    "helium": ("helium", {"head_dim": 8}),
    "glm": ("glm", {}),
    "ernie4_5": ("ernie4_5", {}),
    "hyperclovax": ("hyperclovax", {**GRANITE, "logits_scaling": 0.75}),
    # transformers zeroes the padding token's row as it loads this family
    "youtu": ("youtu", {**LATENT, "head_dim": 4, "pad_token_id": None}),
    "dots1": ("dots1", {**GROUPED, "sliding_window": 8, "max_window_layers": 2}),
    "exaone_moe": (
        "exaone_moe",
        {**EXPERTS, "n_group": 2, "topk_group": 1, "num_shared_experts": 2, "sliding_window": 8},
    ),
    "hy_v3": ("hy_v3", {**EXPERTS, "num_shared_experts": 2, "router_scaling_factor": 1.5}),
    "solar_open": ("solar_open", {k: v for k, v in GROUPED.items() if k != "first_k_dense_replace"}),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 10.0}},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "bamba": (
        "bamba",
        {
            **BAMBA,
            "attn_layer_indices": [1, 3],
            "rope_parameters": {"rope_theta": 1e3, "rope_type": "default"},
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **{**BAMBA, **GRANITE, "layer_types": ["linear_attention", "full_attention"] * 2},
            "mamba_n_groups": 1,
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **{**BAMBA, **GRANITE, "layer_types": ["full_attention", "linear_attention"] * 2},
            **{"shared_intermediate_size": 40, "position_embedding_type": "rope", "num_local_experts": 0},
            "mamba_n_groups": 1,
        },
    ),
    "arcee": ("arcee", {"hidden_act": "relu2"}),
    "nemotron": ("nemotron", {"norm_eps": 1e-3}),
    "stablelm": ("stablelm", {"layer_norm_eps": 1e-3, "use_qkv_bias": True, "head_dim": 8}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-3, "sliding_window": 8, "head_dim": 8}),
    "jais2": ("jais2", {"layer_norm_eps": 1e-3}),
    "granitemoeshared": (
        "granitemoeshared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "ernie4_5_moe": ("ernie4_5_moe", {**EXPERTS, "moe_num_shared_experts": 2, "tie_word_embeddings": False}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 2.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "cohere": ("cohere", {"layer_norm_eps": 1e-3, "head_dim": 8, "logit_scale": 1.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"layer_norm_eps": 1e-3, "head_dim": 8, "logit_scale": 1.5, "sliding_window": 8}),
    "afmoe": (
        "afmoe",
        {
            **EXPERTS,
            "sliding_window": 8,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "route_scale": 1.5,
        },
    ),
    "flint": ("flint", {**EXPERTS, **SHARED, "sliding_window": 8, "mlp_only_layers": [0]}),
    "granite_swa": (
        "granite_swa",
        {
            **GRANITE,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "layer_rope_theta": [1e5, 1e4, 0, 1e4],
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **GRANITE,
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
            "sliding_window": 8,
        },
    ),
    "mellum": (
        "mellum",
        {
            **EXPERTS,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
            **{"global_head_dim": 24, "final_logit_softcapping": 3.0, "num_key_value_heads": 4},
            **{"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
        },
    ),
    "gemma4_unified_text": (
        "gemma4_unified_text",
        {
            **{"global_head_dim": 24, "final_logit_softcapping": 3.0, "num_key_value_heads": 4},
            **{"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
        },
    ),
    "aria_text": (
        "aria_text",
        {"num_local_experts": 4, "moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 16},
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 8},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40, "layer_norm_eps": 1e-3},
            **{"rms_norm_eps": None, "logit_scale": 1.5, "sliding_window_pattern": 2},
            "tie_word_embeddings": False,
        },
    ),
    "cohere2_moe-north": (
        "cohere2_moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 8},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40, "rms_norm_eps": 1e-3},
            **{"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 2},
            **{"logit_scale": 1.5, "sliding_window_pattern": 2, "tie_word_embeddings": False},
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **{
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "v_head_dim": 12,
            },
            **{"head_dim": 24, "sliding_window": 8, "num_key_value_heads": 2},
        },
    ),
    "deepseek_v32": ("deepseek_v32", INDEXED),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXED),
    "mistral4": (
        "mistral4",
        {
            **{**GROUPED, **LATENT, "n_group": 1, "head_dim": 12},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "mscale": 1.0},
                **{"original_max_position_embeddings": 8, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
            },
        },
    ),
    "apertus": ("apertus", {"hidden_act": "xielu"}),
    "olmo": ("olmo", {"clip_qkv": 0.8, "head_dim": 8}),
    "nanochat": ("nanochat", {"hidden_act": "relu2", "final_logit_softcapping": 3.0}),
    "persimmon": ("persimmon", {"layer_norm_eps": 1e-3, "head_dim": 8}),
    "gpt_neox": ("gpt_neox", {"layer_norm_eps": 1e-3, "head_dim": 8}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"layer_norm_eps": 1e-3, "head_dim": 8, "use_parallel_residual": False},
    ),
    "phi": ("phi", {"layer_norm_eps": 1e-3, "head_dim": 8}),
    "gptj": (
        "gptj",
        {
            **{"layer_norm_epsilon": 1e-3, "rotary_dim": 4},
            **{"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64},  # as its files say
        },
    ),
    "falcon": (
        "falcon",
        {"layer_norm_epsilon": 1e-3, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-one-norm": ("falcon", {"layer_norm_epsilon": 1e-3, "bias": True}),
    "llama4_text": (
        "llama4_text",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            **{"intermediate_size_mlp": 40, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 8},
            **{"floor_scale": 8, "attn_scale": 0.5},
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **{**BAMBA, "mamba_d_ssm": 48, "mamba_d_head": 6, "mamba_n_groups": 1},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 2.5, "key_multiplier": 0.7},
            **{
                "attention_in_multiplier": 1.2,
                "attention_out_multiplier": 0.8,
                "mlp_multipliers": [1.5, 0.6],
            },
            **{
                "ssm_in_multiplier": 1.3,
                "ssm_multipliers": [0.9, 0.7, 1.1, 1.2, 0.6],
                "ssm_out_multiplier": 0.5,
            },
        },
    ),
    "falcon_h1-norm": (
        "falcon_h1",
        {**BAMBA, "mamba_d_ssm": 48, "mamba_d_head": 6, "mamba_rms_norm": True},
    ),
    **LATEST,
}
"""Families of parts that those above have too, put together otherwise: not every test takes them by default."""
ALL = {**CASES, **ALIKE}
tiny_classes.register()


def save(case: str, directory: Path, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
    """Writes the checkpoint of ``case`` to ``directory``; no weight is a constant."""
    model_type, different = ALL[case]
    tiny_versions.require(model_type, {**different, **overrides})
    config = transformers.AutoConfig.for_model(model_type, **{**SIZE, **different, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *saved_buffers(model)]:
            if tensor.dim() < 2 or tensor.min() == tensor.max():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json``."""
    parsed: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return parsed


def saved_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers that a checkpoint holds."""
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved]
