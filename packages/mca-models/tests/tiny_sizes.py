"""Sizes of the tiny models, and of what several families have."""

import math
from typing import Any

SIZE: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-3,  # large enough to show a norm that has another
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
MAMBA: dict[str, Any] = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 4, "ssm_state_size": 5, "conv_kernel": 3},
    **{"time_step_min": 0.6, "layer_norm_epsilon": 1e-3, "head_dim": 8},  # steps of this size are shorter
    "chunk_size": 16,  # transformers pads every row to it
}
BAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3, "head_dim": 8},
    "mamba_chunk_size": 16,  # transformers pads every row to it
    "time_step_limit": [0.6, math.inf],
}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 24}
OLD_GROUPS: dict[str, Any] = {**GROUPED, "norm_topk_prob": False}
