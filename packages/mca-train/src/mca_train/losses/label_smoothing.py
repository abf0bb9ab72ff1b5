"""Label smoothing over a vocabulary that is split over tensor-parallel ranks.

Smoothed by ``e``, the loss of a token is ``(1 - e) * nll(target) + e * mean over the vocabulary of nll``, as in
Hugging Face. With ``nll(v) = log sum exp(z) - z_v`` that is ``nll(target) + e * (z_target - mean z)``: the cross
entropy plus two linear terms. Megatron's own smoothing takes the mean over one rank's part of the vocabulary and
includes the padding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train.types import Chunk, Upstream


def smooth_labels(chunks: Iterable[Chunk], epsilon: float, vocab_size: int) -> None:
    """Make the chunk with the loss return the smoothed cross entropy, for MTP layers too.

    Args:
        chunks: Megatron models of this rank.
        epsilon: ``label_smoothing_factor``; 0 removes the setting of another trainer of the model.
        vocab_size: Without padding.
    """
    for chunk in chunks:
        chunk.__dict__.pop("compute_language_model_loss", None)
        if not epsilon or not chunk.post_process:
            continue
        if chunk.config.cross_entropy_loss_fusion and chunk.config.cross_entropy_fusion_impl == "te":
            raise McaError(
                "label_smoothing_factor is not supported with cross_entropy_fusion_impl te, which overwrites the "
                "logits with their gradients; set cross_entropy_fusion_impl to native"
            )
        chunk.compute_language_model_loss = _Smoothed(chunk.compute_language_model_loss, epsilon, vocab_size)


class _Smoothed:
    def __init__(self, plain: Upstream, epsilon: float, vocab_size: int) -> None:
        self._plain, self._epsilon, self._vocab_size = plain, epsilon, vocab_size

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses ``[b, s]`` from ``labels [b, s]`` and ``logits [s, b, vocab / tp]``."""
        extra = target_over_mean(logits, labels.transpose(0, 1), self._vocab_size)  # before logits are reused
        losses: Tensor = self._plain(labels, logits)
        return losses + self._epsilon * extra.transpose(0, 1)


def target_over_mean(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return the target's logit minus the mean of all, fp32.

    Args:
        logits: ``[..., vocab / tp]`` of this tensor-parallel rank.
        labels: ``[...]``
        vocab_size: Without padding, of all ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    true = min(max(vocab_size - first, 0), logits.shape[-1])
    share: Tensor = _Share.apply(logits, labels - first, true, vocab_size)
    result: Tensor = reduce_from_tensor_model_parallel_region(share)
    return result


class _Share(torch.autograd.Function):
    """This rank's share of `target_over_mean`; saves no logits, which Megatron's cross entropy overwrites."""

    @staticmethod
    def forward(ctx: Upstream, logits: Tensor, local: Tensor, true: int, vocab_size: int) -> Tensor:
        here = (local >= 0) & (local < true)
        index = (local * here).unsqueeze(-1)
        ctx.save_for_backward(index, here)
        ctx.shape, ctx.dtype, ctx.true, ctx.vocab_size = logits.shape, logits.dtype, true, vocab_size
        target = logits.gather(-1, index).squeeze(-1).float() * here
        return target - logits[..., :true].sum(-1, dtype=torch.float32) / vocab_size

    @staticmethod
    def backward(ctx: Upstream, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, here = ctx.saved_tensors
        (gradient,) = gradients
        whole = gradient.new_zeros(ctx.shape)
        whole[..., : ctx.true] = -gradient.unsqueeze(-1) / ctx.vocab_size
        whole.scatter_add_(-1, index, (gradient * here).unsqueeze(-1))
        return whole.to(ctx.dtype), None, None, None
