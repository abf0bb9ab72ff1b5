"""The families of the last rounds: what differs from the sizes that all have.

New ones go to the end of `LATEST`: grids deal layouts to cases in order, so one in between gives all after it others.
"""

import math
from typing import Any

import torch
from tiny_sizes import DELTA_NET, GROUPED, LATENT
from transformers.models.longcat_flash import modeling_longcat_flash as longcat
from transformers.models.minimax import modeling_minimax as minimax

NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid": (
        "olmo_hybrid",
        {**DELTA_NET, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **{**GROUPED, **LATENT, "q_lora_rank": None, "num_local_experts": 4, "linear_num_heads": 4},
            **{"linear_head_dim": 8, "linear_conv_kernel_dim": 3},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            **{
                **LATENT,
                "scale_emb": 3,
                "scale_depth": 1.2,
                "dim_model_base": 80,
                "max_position_embeddings": 32,
            },
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 8},
                **{"short_factor": [1.0, 1.2], "long_factor": [1.0, 3.0]},
            },
        },
    ),
    "gpt2": (
        "gpt2",
        {
            **{"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-3},
            **{"num_key_value_heads": 4, "head_dim": 8},
        },
    ),
    "bloom": (
        "bloom",
        {"n_layer": 4, "n_head": 4, "layer_norm_epsilon": 1e-3, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "gpt_bigcode": (
        "gpt_bigcode",
        {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-3},
    ),
    "opt": ("opt", {"ffn_dim": 48, "num_key_value_heads": 4, "head_dim": 8}),
    "gemma4_text-e2b": (
        "gemma4_text",
        {
            **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 70, "global_head_dim": 24},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
            **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
    ),
    "gemma4_text-experts": (
        "gemma4_text",
        {
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
            **{
                "global_head_dim": 24,
                "sliding_window": 8,
                "num_key_value_heads": 4,
                "enable_moe_block": True,
            },
            **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}

LATEST: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": (
        "phimoe",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 8},
            **{"router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True},
        },
    ),
    "phimoe-long": (
        "phimoe",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3, "head_dim": 8},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
                **{"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]},
                **{"short_mscale": 1.2, "long_mscale": 1.2},
            },
        },
    ),
    "minimax_m3_vl_text": (
        "minimax_m3_vl_text",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
            **{"dense_intermediate_size": 48, "shared_intermediate_size": 24, "swiglu_limit": 2.0},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **{
                **LATENT,
                "head_dim": 4,
                "n_routed_experts": 4,
                "zero_expert_num": 2,
                "num_experts_per_tok": 3,
            },
            **{"moe_intermediate_size": 16, "routed_scaling_factor": 1.5, "num_hidden_layers": 8},
        },
    ),
    "mimo": ("mimo", {"head_dim": 8}),
    "lfm2": (
        "lfm2",
        {
            **{"conv_L_cache": 3, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.1, "head_dim": 8},
            "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            **{"conv_L_cache": 5, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4},
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    **{"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                },
            },
        },
    ),
    "lfm3-plain": (
        "lfm3",
        {
            **{"conv_L_cache": 3, "head_dim": 8, "sliding_window": 8, "use_attention_gate": False},
            **{"use_sandwich_norm": False, "tie_word_embeddings": False},
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **{
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "num_dense_layers": 1,
            },
            **{"conv_L_cache": 4, "routed_scaling_factor": 1.5, "head_dim": 8, "tie_word_embeddings": False},
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    "axk1": (
        "axk1",
        {**GROUPED, **LATENT, "head_dim": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "minimax": (
        "minimax",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 4},
            **{
                "full_attn_alpha_factor": 1.5,
                "full_attn_beta_factor": 0.75,
                "linear_attn_alpha_factor": 1.25,
            },
            **{
                "linear_attn_beta_factor": 0.5,
                "mlp_alpha_factor": 0.8,
                "mlp_beta_factor": 1.1,
                "block_size": 8,
            },
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **{**GROUPED, **LATENT, "q_lora_rank": None, "num_local_experts": 4, "head_dim": 8},
            **{"short_conv_kernel_size": 3, "kda_lower_bound": -2.5, "eos_token_id": 1, "num_mtp_layers": 0},
            "layer_group_size": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "bailing_hybrid-unbounded": (
        "bailing_hybrid",
        {
            **{**GROUPED, **LATENT, "num_local_experts": 4, "head_dim": 8, "kda_safe_gate": False},
            **{"q_lora_rank": None, "n_group": 1, "eos_token_id": 1, "num_mtp_layers": 0},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "jamba": (
        "jamba",
        {
            **{"mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 6, "num_experts": 4, "head_dim": 8},
            **{"num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
            **{"expert_layer_period": 2, "expert_layer_offset": 0},
        },
    ),
    "jamba-dense": (
        "jamba",
        {
            **{"mamba_d_state": 4, "mamba_conv_bias": False, "mamba_expand": 3, "num_experts": 0},
            **{"head_dim": 8, "attn_layer_period": 3, "attn_layer_offset": 1, "tie_word_embeddings": True},
        },
    ),
    "mamba": (
        "mamba",
        {
            **{"state_size": 5, "conv_kernel": 3, "time_step_rank": 6, "layer_norm_epsilon": 1e-3},
            **{"intermediate_size": 64, "head_dim": 8, "tie_word_embeddings": True},
        },
    ),
    "falcon_mamba": (
        "falcon_mamba",
        {
            **{"state_size": 4, "intermediate_size": 96, "use_conv_bias": False, "layer_norm_epsilon": 1e-3},
            **{"mixer_rms_eps": 0.1, "head_dim": 8, "tie_word_embeddings": False},
        },
    ),
    "mamba2": (
        "mamba2",
        {
            **{"num_heads": 8, "head_dim": 8, "n_groups": 4, "state_size": 5, "conv_kernel": 3},
            **{"time_step_limit": [0.6, math.inf], "layer_norm_epsilon": 1e-3},
        },
    ),
    "bailing_hybrid-compressed": (
        "bailing_hybrid",
        {
            **{**GROUPED, **LATENT, "num_local_experts": 4, "head_dim": 8, "layer_group_size": 2},
            **{"eos_token_id": 1, "num_mtp_layers": 0},
        },
    ),
    "exaone": ("exaone", {"head_dim": 8}),
    "sarvam_moe": ("sarvam_moe", GROUPED),
    "sarvam_mla": ("sarvam_mla", {**GROUPED, **LATENT, "q_lora_rank": None}),
}


class LongcatFlashExperts(longcat.LongcatFlashExperts):  # type: ignore[misc]
    """transformers makes matrices for experts without weights too, which no published file has and nothing reads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_up_proj = torch.nn.Parameter(self.gate_up_proj.detach()[: self.num_routed_experts].clone())


longcat.LongcatFlashExperts = LongcatFlashExperts


class MiniMaxLightningAttention(minimax.MiniMaxLightningAttention):  # type: ignore[misc]
    """transformers saves tables of decays too, which follow from the configuration and which mca ignores."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self._non_persistent_buffers_set |= set(self._buffers)


minimax.MiniMaxLightningAttention = MiniMaxLightningAttention
