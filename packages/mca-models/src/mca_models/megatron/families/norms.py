"""Norms where Megatron has none: over all heads of q or k together, and after attention and MLP."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.layers.sharded import cut_parameter, sharded_state
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, ShardedState, WithBias


class FullWidthNorm(torch.nn.Module):
    """RMSNorm of all heads of a token together, which tensor ranks share out.

    Its weight has one number for each channel of each head of this rank.
    """

    heads = "num_attention_heads"

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.width = getattr(config, self.heads) * hidden_size
        share = self.width // config.tensor_model_parallel_size
        self.weight = cut_parameter((share,), config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., heads / tp, channels]``, normalised in fp32, in its own dtype."""
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """For Megatron's distributed checkpoint: cut over tensor ranks."""
        return sharded_state(self, prefix, sharded_offsets, {"weight": 0})


class FullWidthKeyNorm(FullWidthNorm):
    """``FullWidthNorm`` of the keys."""

    heads = "num_query_groups"


class PerHeadNorm(Norm):
    """Normalises each head on its own, with a weight for each channel of each head of this rank."""

    heads = "num_attention_heads"
    has_weight = has_bias = False

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        share = getattr(config, self.heads) * hidden_size // config.tensor_model_parallel_size
        self.weight = cut_parameter((share,), config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., heads / tp, channels]``, in its own dtype."""
        normal = self.normal(x.float(), None)
        return (normal * self.weight.float().view(-1, *self.shape)).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """For Megatron's distributed checkpoint: cut over tensor ranks."""
        return sharded_state(self, prefix, sharded_offsets, {"weight": 0})


class PerHeadKeyNorm(PerHeadNorm):
    """``PerHeadNorm`` of the keys."""

    heads = "num_query_groups"


class PostRopeNorm(Norm):
    """A norm of q or k that waits for the rope: Megatron normalises before it rotates."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` as it is."""
        return x

    def normalize(self, x: Tensor) -> Tensor:
        """``x`` normalised."""
        return super().forward(x)


class PostRopeNormWithoutWeight(PostRopeNorm):
    """``PostRopeNorm`` without a weight."""

    has_weight = has_bias = False


def normalise_after_rope(model: GptModel, skips: Sequence[int] | None) -> None:
    """Has the ``PostRopeNorm`` of every attention of a chunk applied to what its core attention is given.

    Args:
        model: The chunk.
        skips: 1 for each decoder layer that has no rope, and then no norm; None: all have it.
    """
    for layer in model.decoder.layers:
        attention = layer.self_attention
        if skips is not None and skips[layer.layer_number - 1]:
            continue
        attention.core_attention.register_forward_pre_hook(
            partial(_normalise_rotated, attention.q_layernorm.normalize, attention.k_layernorm.normalize)
        )


def _normalise_rotated(
    of_query: Callable[[Tensor], Tensor],
    of_key: Callable[[Tensor], Tensor],
    core: torch.nn.Module,
    args: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    query, key, *others = args
    return of_query(query), of_key(key), *others


class PostNorm(Norm):
    """The norm of what attention or MLP gives, before it is added to the residual."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """For Megatron's distributed checkpoint: the same on all tensor ranks."""
        return sharded_state(self, prefix, sharded_offsets, {})


def add_post_norms(model: GptModel, config: McaModelConfig) -> None:
    """Gives attention and MLP of each decoder layer that has norms behind them a ``post_layernorm`` for their output.

    A hook on the whole block, not on its last projection: what an adapter adds to that one is normalised too.
    """
    for layer in model.decoder.layers:
        placement = config.layer_config(layer.layer_number - 1).norm_placement
        for block in (layer.self_attention, layer.mlp) if placement != "pre" else ():
            block.post_layernorm = PostNorm(
                model.config, model.config.hidden_size, model.config.layernorm_epsilon
            )
            block.register_forward_hook(_normalise_output)


def _normalise_output(block: MegatronModule, args: tuple[object, ...], output: WithBias) -> WithBias:
    value, bias = output
    return block.post_layernorm(value), bias
