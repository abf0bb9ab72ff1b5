"""Inputs of the loss: the cross entropy of each token, smoothed or not, or other values of each token.

They may be computed a chunk of tokens at a time; `mca_models.megatron.log_probs.chunks` then avoids the full logits of
a micro-batch.

Label smoothing works over a vocabulary that is split over tensor-parallel ranks. Smoothed by ``e``, the loss of a token
is ``(1 - e) * nll(target) + e * mean over the vocabulary of nll``, as in Hugging Face. With
``nll(v) = log sum exp(z) - z_v`` that is ``nll(target) + e * (z_target - mean z)``: the cross entropy plus two linear
terms. Megatron's own smoothing takes the mean over one rank's part of the vocabulary and includes the padding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.log_probs.chunks import ChunkedOutput, token_values
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_train.types import Chunk, Upstream

_TOKENS = 1024
"""Chunk size for ``values`` if ``loss_chunk_size`` is not set."""


def chunk_losses(
    chunks: Iterable[Chunk],
    tokens: int | None,
    *,
    wants_logits: bool,
    values: TokenValues | None = None,
    vocab_size: int = 0,
) -> None:
    """Make the chunk with the loss compute it ``tokens`` at a time.

    Args:
        chunks: Megatron models of this rank.
        tokens: ``loss_chunk_size``; None removes the setting of another trainer of the model.
        wants_logits: The trainer's loss uses full logits.
        values: Values that the loss uses instead of the cross entropy.
        vocab_size: Without padding; for ``values``.

    Raises:
        McaError: The loss cannot be computed in chunks.
    """
    for chunk in chunks:
        if isinstance(vars(chunk).get("_postprocess"), ChunkedOutput):
            del chunk._postprocess
        if wants_logits and chunk.config.mtp_num_layers:
            raise McaError(
                "wants_logits is not supported with MTP layers, which would stay untrained; set mtp_num_layers to 0"
            )
        if tokens is None and values is None:
            continue
        key = "token_values" if tokens is None else "loss_chunk_size"
        if wants_logits:
            raise McaError(f"{key} is not supported with wants_logits; remove it")
        if chunk.config.mtp_num_layers:
            raise McaError(
                f"{key} is not supported with MTP layers, whose loss needs full logits; remove it or set "
                "mtp_num_layers to 0"
            )
        if chunk.post_process:
            _disable_grad_fusion(chunk)
            compute = (
                chunk.compute_language_model_loss if values is None else token_values(values, vocab_size)
            )
            chunk._postprocess = ChunkedOutput(chunk, tokens or _TOKENS, compute)


def _disable_grad_fusion(model: Chunk) -> None:
    for module in model.output_layer.modules():
        if hasattr(module, "gradient_accumulation_fusion"):  # it expects main_grad on saved tensors
            module.gradient_accumulation_fusion = False


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
