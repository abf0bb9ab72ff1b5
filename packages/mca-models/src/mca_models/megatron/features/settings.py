"""Settings of Megatron's ``TransformerConfig`` for single features.

Common settings are in `factory.transformer_config`.
"""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.features import active_features
from mca_models.megatron.types import MegatronConfig, Settings


def settings(config: McaModelConfig) -> Settings:
    """Return the settings that differ from Megatron's defaults."""
    values: Settings = {
        "softmax_scale": config.attention.softmax_scale,
        "activation_func_clamp_value": config.mlp.activation_func_clamp_value,
        "glu_linear_offset": config.mlp.glu_linear_offset or None,
        "attention_output_gate": config.attention.attention_output_gate or None,
        "softmax_type": None if config.attention.softmax_type == "vanilla" else config.attention.softmax_type,
        "no_rope_freq": list(config.rope.no_rope_freq) if config.rope.no_rope_freq else None,
    }
    if not has_fused_activation(config):
        values["bias_activation_fusion"] = False
    if len(config.kinds()) > 1:
        values["hetereogenous_dist_checkpoint"] = True  # tensors of layers that differ are not stacked
    chosen = {name: value for name, value in values.items() if value is not None}
    for feature in active_features(config):
        chosen |= feature.settings(config)
    return chosen


def has_fused_activation(config: McaModelConfig) -> bool:
    """Return whether Megatron has an exact fused activation for every MLP; the one for ``gelu`` is approximate."""
    if config.mlp.mlp_multipliers is not None:
        return False
    if config.mlp.hidden_act == "quick_gelu":  # fused for routed experts only
        dense = not all(config.is_moe_layer(i) for i in range(config.num_layers))
        return not dense and given(config.moe).moe_shared_expert_intermediate_size is None
    return config.mlp.hidden_act == "silu" and config.mlp.gated_linear_unit


def before_building(config: McaModelConfig, megatron: MegatronConfig) -> None:
    """Restore the settings that ``after_building`` of the previous chunk changed."""
    megatron.qk_layernorm = config.attention.qk_layernorm
    megatron.moe_router_enable_expert_bias = (
        config.moe is not None and config.moe.moe_router_enable_expert_bias
    )


def after_building(config: McaModelConfig, megatron: MegatronConfig) -> None:
    """Change settings that Megatron reads during training, after the modules are built.

    Megatron sums the gradients of all ``q_layernorm`` and ``k_layernorm`` over tensor ranks where ``qk_layernorm`` is
    set; norms with weights for each head are sharded like the heads, and their gradients are complete.
    """
    if config.attention.qk_layernorm_full_width or config.attention.qk_layernorm_per_head:
        megatron.qk_layernorm = False
