"""Limits of fused kernels, which compute something else than some models do; part of `limits`."""

from collections.abc import Iterator

from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron.features.chunk import has_fused_activation
from mca_models.megatron.features.feature import FIXED_IN_0_17, Version
from mca_models.megatron.layers.rope import attention_factor

_ENGINE_WITH_STRIDES: Version = (2, 11)
"""First version of Transformer Engine whose cross entropy accepts non-contiguous gradients."""


def fused_problems(
    config: McaModelConfig, settings: Values, version: Version, engine: Version | None
) -> Iterator[str]:
    """Yield the fused kernels that cannot run this model.

    Args:
        config: The model.
        settings: Arguments of Megatron's ``TransformerConfig``.
        version: Version of megatron-core.
        engine: Version of Transformer Engine; None: not installed.
    """
    yield from _activation(config, settings)
    yield from _rope(config, settings, version)
    if settings.get("cross_entropy_fusion_impl") == "te":
        yield from _cross_entropy(settings, engine)


def has_altered_glu(config: McaModelConfig) -> bool:
    """Return whether a gated MLP computes more than its activation times the other half."""
    clamped = config.mlp.activation_func_clamp_value is not None
    return clamped or bool(config.mlp.glu_linear_offset) or config.mlp.mlp_multipliers is not None


def _activation(config: McaModelConfig, settings: Values) -> Iterator[str]:
    """Yield problems of fused activations: Transformer Engine approximates gelu and treats ungated silu as ReLU."""
    if settings.get("bias_activation_fusion") and not has_fused_activation(config):
        yield "bias_activation_fusion has no kernel for the MLPs of this model; remove it"
    swiglu = config.mlp.hidden_act == "silu" and config.mlp.gated_linear_unit and not has_altered_glu(config)
    for name in ("use_te_activation_func", "use_transformer_engine_op_fuser"):
        if settings.get(name) and not swiglu:
            yield f"{name} computes another activation than this model, whose MLPs are not plain gated silu; remove it"
    if settings.get("use_transformer_engine_op_fuser") and (
        config.norm.norm_placement == "post" or config.has_custom_norms
    ):
        yield (
            "use_transformer_engine_op_fuser needs Transformer Engine's norm before each MLP, which this model does "
            "not have; remove it"
        )


def _rope(config: McaModelConfig, settings: Values, version: Version) -> Iterator[str]:
    """Yield problems of fused RoPE, to which Megatron passes fewer arguments for packed rows."""
    if not settings.get("apply_rope_fusion"):
        return
    kind = (config.rope.rope_scaling or {}).get("rope_type", "yarn")
    if config.mla is not None and kind != "yarn":
        yield f"apply_rope_fusion is not supported for MLA with rope_type {kind}; remove it"
    if config.mla is None and attention_factor(config) != 1.0:
        yield f"apply_rope_fusion omits the factor of rope_type {kind} on packed rows; remove it"
    if config.rope.rotary_interleaved and version < FIXED_IN_0_17:
        yield "apply_rope_fusion of megatron-core 0.16 does not interleave the channels of packed rows; remove it"


def _cross_entropy(settings: Values, engine: Version | None) -> Iterator[str]:
    if settings.get("fp16"):
        yield "cross_entropy_fusion_impl te takes logits in bf16 or fp32, not in fp16; set it to native"
    if engine is not None and engine < _ENGINE_WITH_STRIDES:
        yield (
            f"cross_entropy_fusion_impl te of Transformer Engine {'.'.join(map(str, engine))} gives tokens the "
            "gradients of other tokens; install version 2.11 or later, or set it to native"
        )
