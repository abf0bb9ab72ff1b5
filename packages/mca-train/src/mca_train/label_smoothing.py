"""Label smoothing over a vocabulary that is cut over tensor-parallel ranks.

Smoothed by ``e``, the loss of a token is ``(1 - e) * nll(target) + e * mean over the vocabulary of nll``, as in
Hugging Face. With ``nll(v) = log sum exp(z) - z_v`` that is ``nll(target) + e * (z_target - mean z)``: two linear
terms beside the cross entropy. Megatron's own smoothing takes its mean over one rank's part of the vocabulary and
counts the padding in it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mca_config.errors import McaError


def smooth_labels(chunks: Iterable[Any], epsilon: float, vocab_size: int) -> None:
    """Has the chunk with the loss return the smoothed cross entropy, of prediction layers' too.

    Args:
        chunks: Megatron models of this rank.
        epsilon: ``label_smoothing_factor``.
        vocab_size: Without padding.
    """
    for chunk in chunks:
        if not getattr(chunk, "post_process", False):
            continue
        if chunk.config.cross_entropy_loss_fusion and chunk.config.cross_entropy_fusion_impl == "te":
            raise McaError(
                "label_smoothing_factor does not work with cross_entropy_fusion_impl te, which overwrites the "
                "logits with their gradients; set cross_entropy_fusion_impl to native"
            )
        chunk.compute_language_model_loss = _Smoothed(chunk.compute_language_model_loss, epsilon, vocab_size)


class _Smoothed:
    def __init__(self, plain: Any, epsilon: float, vocab_size: int) -> None:
        self._plain, self._epsilon, self._vocab_size = plain, epsilon, vocab_size

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        """``labels [b, s]`` and ``logits [s, b, vocab / tp]`` to ``[b, s]``."""
        extra = target_over_mean(logits, labels.transpose(0, 1), self._vocab_size)  # before logits are reused
        losses: Tensor = self._plain(labels, logits)
        return losses + self._epsilon * extra.transpose(0, 1)


def target_over_mean(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """The target's logit minus the mean of all, fp32.

    Args:
        logits: ``[..., vocab / tp]`` of this tensor-parallel rank.
        labels: ``[...]``
        vocab_size: Without padding, of all ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    true = min(max(vocab_size - first, 0), logits.shape[-1])
    local = labels - first
    here = (local >= 0) & (local < true)
    target = torch.gather(logits, -1, (local * here).unsqueeze(-1)).squeeze(-1).float() * here
    mean = logits[..., :true].sum(-1, dtype=torch.float32) / vocab_size
    result: Tensor = reduce_from_tensor_model_parallel_region(target - mean)
    return result
