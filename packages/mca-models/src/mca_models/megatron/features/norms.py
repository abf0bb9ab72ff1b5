"""Norms that Megatron lacks: across all heads of q or k, after RoPE, and after attention and MLP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import (
    ClassChange,
    Context,
    Feature,
    LayerContext,
    Setup,
    SpecChange,
    SpecChanges,
    remove_module,
)
from mca_models.megatron.layers.norm import Norm, norm_with
from mca_models.megatron.layers.sharded import ShardedModule, cut_parameter
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, Settings, WithBias


class FullWidthNorm(ShardedModule):
    """RMSNorm across all heads of a token, which tensor ranks share.

    Its weight has one number for each channel of each head of this rank.
    """

    axes: ClassVar = {"weight": 0}
    heads = "num_attention_heads"

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.width = getattr(config, self.heads) * hidden_size
        share = self.width // config.tensor_model_parallel_size
        self.weight = cut_parameter((share,), config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., heads / tp, channels]`` in fp32; return its dtype."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        flat = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True))
        # every rank's output depends on the sum: its gradient is summed back
        mean = copy_to_tensor_model_parallel_region(squares) / self.width
        normal: Tensor = flat * torch.rsqrt(mean + self.eps) * self.weight.float()
        return normal.to(x.dtype).view_as(x)


class FullWidthKeyNorm(FullWidthNorm):
    """``FullWidthNorm`` of the keys."""

    heads = "num_query_groups"


class PerHeadNorm(ShardedModule, Norm):
    """Norm of each head with a weight for each channel of each head of this rank."""

    axes: ClassVar = {"weight": 0}
    heads = "num_attention_heads"
    has_weight = has_bias = False

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        share = getattr(config, self.heads) * hidden_size // config.tensor_model_parallel_size
        self.weight = cut_parameter((share,), config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., heads / tp, channels]``; return its dtype."""
        normal = self.normal(x.float(), None)
        return (normal * self.weight.float().view(-1, *self.shape)).to(x.dtype)


class PerHeadKeyNorm(PerHeadNorm):
    """``PerHeadNorm`` of the keys."""

    heads = "num_query_groups"


class PostRopeNorm(Norm):
    """Norm of q or k after RoPE; Megatron's position for it, before RoPE, passes the input through."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` unchanged."""
        return x

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        return super().forward(x)


class PostRopeNormWithoutWeight(PostRopeNorm):
    """``PostRopeNorm`` without a weight."""

    has_weight = has_bias = False


def normalise_after_rope(model: GptModel, skips: Sequence[int] | None) -> None:
    """Apply the ``PostRopeNorm`` of every attention of a chunk to the inputs of its core attention.

    Args:
        model: The chunk.
        skips: 1 for each decoder layer without RoPE, which has no norm either; None: all have it.
    """
    for layer in model.decoder.layers:
        attention = layer.self_attention
        if skips is not None and skips[layer.layer_number - 1]:
            continue
        attention.core_attention.register_forward_pre_hook(
            partial(_normalise_rotated, attention.q_layernorm.normalize, attention.k_layernorm.normalize)
        )


def _normalise_rotated(
    query_norm: Callable[[Tensor], Tensor],
    key_norm: Callable[[Tensor], Tensor],
    core: torch.nn.Module,
    args: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    query, key, *rest = args
    return query_norm(query), key_norm(key), *rest


class PostNorm(ShardedModule, Norm):
    """Norm of the output of attention or MLP, before it is added to the residual."""


def add_post_norms(model: GptModel, config: McaModelConfig) -> None:
    """Add a ``post_layernorm`` to the output of attention and MLP in decoder layers with post-norms.

    The hook is on the whole block, not on its last projection, so that an adapter's output is normalized too.
    """
    for layer in model.decoder.layers:
        placement = config.layer_config(layer.layer_number - 1).norm.norm_placement
        for block in (layer.self_attention, layer.mlp) if placement != "pre" else ():
            add_post_norm(block, model.config)


def add_post_norm(block: MegatronModule, config: MegatronConfig) -> None:
    """Add a ``post_layernorm`` to the output of one attention or MLP."""
    block.post_layernorm = PostNorm(config, config.hidden_size, config.layernorm_epsilon)
    block.register_forward_hook(_normalise_output)


def _normalise_output(block: MegatronModule, args: tuple[object, ...], output: WithBias) -> WithBias:
    value, bias = output
    return block.post_layernorm(value), bias


def _custom_norms(context: Context) -> SpecChanges:
    """Return the changes to mca's norms before attention and MLP and after all layers."""
    config = context.config.norm
    norm = norm_with(weight=config.norm_weight, bias=config.norm_bias)

    def replace(module: object) -> type:
        return norm

    fields: dict[str, SpecChange] = {}
    if config.norm_placement != "post":
        fields = {"input_layernorm": replace, "pre_mlp_layernorm": replace}
    if context.implementation != "transformer_engine":
        return SpecChanges(fields, {Norm: replace})
    from megatron.core.extensions.transformer_engine import TENorm

    return SpecChanges(fields, {**_without_fused_norms(context), TENorm: replace, Norm: replace})


def _without_fused_norms(context: Context) -> dict[type, ClassChange]:
    """Return the change of Transformer Engine's fused norm-and-linear class."""
    if context.implementation != "transformer_engine":
        return {}
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
    )

    return {TELayerNormColumnParallelLinear: lambda linear: TEColumnParallelLinear}


def _without_pre_norms(context: LayerContext) -> SpecChanges:
    """Remove the norms before attention and MLP from a layer with post-norms only."""
    if context.layer.norm.norm_placement != "post":
        return SpecChanges()
    fields = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), remove_module)
    return SpecChanges(fields, _without_fused_norms(context))


def _qk_norms(query: type, key: type) -> SpecChanges:
    return SpecChanges({"q_layernorm": lambda norm: query, "k_layernorm": lambda norm: key})


@contextmanager
def _complete_gradients(context: Context, megatron: MegatronConfig) -> Iterator[None]:
    """Set ``qk_layernorm`` only while the modules are built.

    Megatron sums the gradients of all ``q_layernorm`` and ``k_layernorm`` over tensor ranks where it is set; norms with
    weights for each head are sharded like the heads, and their gradients are complete.
    """
    megatron.qk_layernorm = context.config.attention.qk_layernorm
    yield
    megatron.qk_layernorm = False


def _norms_after_rope(context: Context) -> SpecChanges:
    norm = PostRopeNorm if context.config.attention.qk_layernorm_weight else PostRopeNormWithoutWeight
    return _qk_norms(norm, norm)


def _no_fused_norm(setup: Setup) -> Iterator[str]:
    config = setup.config
    missing = config.norm.norm_placement == "post" or config.has_custom_norms
    if setup.settings.get("use_transformer_engine_op_fuser") and missing:
        yield (
            "use_transformer_engine_op_fuser needs Transformer Engine's norm before each MLP, which this model does "
            "not have; remove it"
        )


def _settings(config: McaModelConfig) -> Settings:
    return {
        "normalization": config.norm.normalization,
        "layernorm_epsilon": config.norm.layernorm_epsilon,
        "layernorm_zero_centered_gamma": config.norm.layernorm_zero_centered_gamma,
    }


NORMS = Feature(name="layer norms", enabled=lambda config: True, settings=_settings, problems=_no_fused_norm)
CUSTOM_NORMS = Feature(
    name="layer norms that Transformer Engine cannot fuse",
    enabled=lambda config: config.has_custom_norms,
    spec=_custom_norms,
)
FULL_WIDTH_QK_NORMS = Feature(
    name="norms across all heads of q and k",
    enabled=lambda config: config.attention.qk_layernorm_full_width,
    spec=lambda context: _qk_norms(FullWidthNorm, FullWidthKeyNorm),
    prepare=_complete_gradients,
)
PER_HEAD_QK_NORMS = Feature(
    name="norms of q and k with weights for each head",
    enabled=lambda config: config.attention.qk_layernorm_per_head,
    spec=lambda context: _qk_norms(PerHeadNorm, PerHeadKeyNorm),
    prepare=_complete_gradients,
)

POST_NORMS = Feature(
    name="norms after attention and MLP",
    enabled=lambda config: any(kind.norm.norm_placement != "pre" for kind in config.kinds()),
    layer=_without_pre_norms,
    finish=add_post_norms,
)
NORMS_AFTER_ROPE = Feature(
    name="norms of q and k after RoPE",
    enabled=lambda config: config.attention.qk_layernorm_after_rope,
    spec=_norms_after_rope,
    finish=lambda model, config: normalise_after_rope(model, config.rope.no_rope_freq),
)
