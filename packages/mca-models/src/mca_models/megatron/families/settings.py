"""Settings of Megatron's ``TransformerConfig`` that only some families have.

Those that all families share are in `factory.transformer_config`.
"""

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.biased_router import has_biased_softmax
from mca_models.megatron.families.group_router import custom_group_router
from mca_models.megatron.types import MegatronConfig, Settings


def settings(config: McaModelConfig) -> Settings:
    """The settings that differ from Megatron's defaults."""
    found: Settings = {
        "moe_latent_size": config.moe_latent_size,
        "softmax_scale": config.softmax_scale,
        "activation_func_clamp_value": config.activation_func_clamp_value,
        "glu_linear_offset": config.glu_linear_offset or None,
        "attention_output_gate": config.attention_output_gate or None,
        "softmax_type": None if config.softmax_type == "vanilla" else config.softmax_type,
        "no_rope_freq": list(config.no_rope_freq) if config.no_rope_freq else None,
    }
    if config.num_moe_experts and config.add_bias_linear:
        found["bias_dropout_fusion"] = False  # grouped experts refuse it
    if not has_fused_activation(config):
        found["bias_activation_fusion"] = False
    if config.linear_conv_kernel_dim is not None:
        found |= {
            # makes Megatron's distributed checkpoint expect different layers
            "linear_attention_freq": [int(config.is_linear_layer(i)) for i in range(config.num_layers)],
            "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
            "linear_num_key_heads": config.linear_num_key_heads,
            "linear_num_value_heads": config.linear_num_value_heads,
            "linear_key_head_dim": config.linear_key_head_dim,
            "linear_value_head_dim": config.linear_value_head_dim,
        }
    if config.mamba_num_heads is not None or len(config.kinds()) > 1:
        found["hetereogenous_dist_checkpoint"] = True  # tensors of layers that differ are not stacked
    chosen = {name: value for name, value in found.items() if value is not None}
    if custom_group_router(config) is not None:
        chosen |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if has_biased_softmax(config):  # which Megatron refuses; it builds one nevertheless
        chosen["moe_router_enable_expert_bias"] = False
    return chosen


def has_fused_activation(config: McaModelConfig) -> bool:
    """Whether Megatron has a kernel for it in every MLP; that for ``gelu`` computes an approximation."""
    if config.mlp_multipliers is not None:
        return False
    if config.hidden_act == "quick_gelu":  # of routed experts alone
        dense = not all(config.is_moe_layer(i) for i in range(config.num_layers))
        return not dense and config.moe_shared_expert_intermediate_size is None
    return config.hidden_act == "silu" and config.gated_linear_unit


def before_building(config: McaModelConfig, megatron: MegatronConfig) -> None:
    """Sets what building a chunk looks at, which ``after_building`` of the chunk before it changed."""
    megatron.qk_layernorm = config.qk_layernorm
    megatron.moe_router_enable_expert_bias = config.moe_router_enable_expert_bias


def after_building(config: McaModelConfig, megatron: MegatronConfig) -> None:
    """Corrects what Megatron reads from its configuration during training, once the modules stand.

    It sums the gradients of all ``q_layernorm`` and ``k_layernorm`` over tensor ranks where ``qk_layernorm`` is
    set; norms with weights for each head are cut like the heads, and their gradients are whole.
    """
    if config.qk_layernorm_full_width or config.qk_layernorm_per_head:
        megatron.qk_layernorm = False
