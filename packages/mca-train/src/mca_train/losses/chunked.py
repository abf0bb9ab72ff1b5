"""Cross entropy a chunk of tokens at a time, so that the logits of a micro-batch never stand whole.

The output layer and the cross entropy run on a few tokens, forget everything, and run again in the backward pass. So
the logits and their softmax (``tokens x vocabulary / tp``, kept once or twice and in fp32) shrink to those of one
chunk, for one more product with the output matrix. What the layers do stays theirs: vocabulary and sequence
parallelism, the masked padding of the vocabulary, factors on logits, smoothed labels, adapters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mca_config.errors import McaError
from mca_train.types import Chunk, Upstream


def chunk_losses(chunks: Iterable[Chunk], tokens: int | None, *, wants_logits: bool) -> None:
    """Has the chunk with the loss compute it ``tokens`` at a time.

    Args:
        chunks: Megatron models of this rank.
        tokens: ``loss_chunk_size``; None takes away what another trainer of the model set.
        wants_logits: Whether the trainer's loss is made of whole logits.

    Raises:
        McaError: The loss cannot be computed so.
    """
    for chunk in chunks:
        chunk.__dict__.pop("_postprocess", None)
        if tokens is None:
            continue
        if wants_logits:
            raise McaError("loss_chunk_size does nothing for a trainer that wants logits; remove it")
        if chunk.config.mtp_num_layers:
            raise McaError(
                "loss_chunk_size does not work with prediction layers, whose loss Megatron computes from whole "
                "logits; remove it or set mtp_num_layers to 0"
            )
        if chunk.post_process:
            chunk._postprocess = _Chunked(chunk, tokens)


class _Chunked:
    """Stands for a ``GPTModel``'s ``_postprocess``."""

    def __init__(self, model: Chunk, tokens: int) -> None:
        self._model, self._plain, self._tokens = model, model._postprocess, tokens
        for module in model.output_layer.modules():
            if hasattr(module, "gradient_accumulation_fusion"):  # it looks for main_grad on what is kept
                module.gradient_accumulation_fusion = False

    def __call__(self, *, hidden_states: Tensor, labels: Tensor | None, **rest: Upstream) -> Tensor:
        """``hidden_states [s / ranks, b, h]`` and ``labels [b, s]`` to the cross entropy of each token ``[b, s]``.

        ``ranks`` is the tensor-parallel size under sequence parallelism, else 1.
        """
        if labels is None:
            whole: Tensor = self._plain(hidden_states=hidden_states, labels=None, **rest)
            return whole
        model = self._model
        weight = None
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        rows = hidden_states.shape[0]
        by_rank = labels.reshape(len(labels), -1, rows)  # which of the tokens each rank holds
        step = max(self._tokens * rows // labels.numel(), 1)
        losses = [
            checkpoint(self._losses, hidden, part, weight, use_reentrant=False, preserve_rng_state=False)
            for hidden, part in zip(hidden_states.split(step), by_rank.split(step, 2), strict=True)
        ]
        return torch.cat(losses, 2).reshape(labels.shape)

    def _losses(self, hidden: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """Of ``hidden [c, b, h]`` on each rank and ``labels [b, ranks, c]`` of all."""
        logits, _ = self._model.output_layer(hidden, weight=weight)
        losses: Tensor = self._model.compute_language_model_loss(labels.flatten(1), logits)
        return losses.view(labels.shape)
