"""Log-probabilities over a sharded vocabulary and the gathering of context-parallel tokens, with gradients."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from mca_models.megatron.layers.zigzag import restore_token_order, take_rank_tokens
from mca_train.types import Upstream


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True
) -> Tensor:
    """Return the log-probability of each target in fp32; the logits are not changed.

    Args:
        vocab_parallel_logits: ``[b, s, padded_vocab / tp]``; padded rows have the lowest number.
        target: Token ids ``[b, s]``.
        use_fused_kernel: Ignored: Megatron's cross entropy is used.
    """
    logits = vocab_parallel_logits.to(torch.float32, copy=True)
    losses: Tensor = vocab_parallel_cross_entropy(logits, target)
    return -losses


class _GatherTokens(torch.autograd.Function):
    """Gather of tokens whose gradient is this rank's part: every rank computes the same loss of them."""

    @staticmethod
    def forward(ctx: Upstream, shard: Tensor, axis: int) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        ctx.axis, ctx.rank, ctx.size = axis, group.rank(), group.size()
        rows = shard.transpose(0, axis).contiguous()
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, rows, group=group)
        (ordered,) = restore_token_order(gathered, [gathered.shape[0]], group.size())
        return ordered.transpose(0, axis)

    @staticmethod
    def backward(ctx: Upstream, gradient: Tensor) -> tuple[Tensor, None]:
        return take_rank_tokens(gradient, ctx.axis, ctx.rank, ctx.size), None


def context_parallel_gather(context_parallel_input: Tensor, parallel_dim: int = -1) -> Tensor:
    """Return the tokens of all context-parallel ranks in order.

    Every rank must compute the same loss from the result: each keeps the gradient of the tokens that it holds.

    Args:
        context_parallel_input: This rank's tokens of one sequence axis.
        parallel_dim: That axis.
    """
    axis = parallel_dim % context_parallel_input.dim()
    gathered: Tensor = _GatherTokens.apply(context_parallel_input, axis)
    return gathered
