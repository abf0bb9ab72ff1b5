"""Loss inputs computed a chunk of tokens at a time: the cross entropy, or values of each token.

`mca_models.megatron.log_probs.chunks` avoids the full logits of a micro-batch.
"""

from collections.abc import Iterable

from mca_config.errors import McaError
from mca_models.megatron.log_probs.chunks import ChunkedOutput, token_values
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_train.types import Chunk

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
