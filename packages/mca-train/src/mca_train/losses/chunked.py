"""What a trainer's loss is made of, computed a chunk of tokens at a time: cross entropy, or values of tokens.

How the logits of a micro-batch come not to stand whole is said in `mca_models.megatron.log_probs.chunks`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mca_config.errors import McaError
from mca_models.megatron.log_probs.chunks import ChunkedOutput, token_values
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_train.types import Chunk

_TOKENS = 1024
"""How many at a time where values are wanted and ``loss_chunk_size`` is not set."""
_OUTPUT = ("_postprocess", "compute_language_model_loss")
"""What trainers put in the place of a chunk's methods."""


def chunk_losses(
    chunks: Iterable[Chunk],
    tokens: int | None,
    *,
    wants_logits: bool,
    values: TokenValues | None = None,
    vocab_size: int = 0,
) -> None:
    """Has the chunk with the loss compute it ``tokens`` at a time.

    Args:
        chunks: Megatron models of this rank.
        tokens: ``loss_chunk_size``; None takes away what another trainer of the model set.
        wants_logits: Whether the trainer's loss is made of whole logits.
        values: What the loss is made of instead of the cross entropy.
        vocab_size: Without padding; for ``values``.

    Raises:
        McaError: The loss cannot be computed so.
    """
    for chunk in chunks:
        if isinstance(vars(chunk).get("_postprocess"), ChunkedOutput):
            del chunk._postprocess
        if wants_logits and chunk.config.mtp_num_layers:
            raise McaError(
                "a trainer that wants logits does not train prediction layers, which would not fit the trained model; "
                "set mtp_num_layers to 0"
            )
        if tokens is None and values is None:
            continue
        key = "token_values" if tokens is None else "loss_chunk_size"
        if wants_logits:
            raise McaError(f"{key} does nothing for a trainer that wants logits; remove it")
        if chunk.config.mtp_num_layers:
            raise McaError(
                f"{key} does not work with prediction layers, whose loss Megatron computes from whole "
                "logits; remove it or set mtp_num_layers to 0"
            )
        if chunk.post_process:
            _forget_fusion(chunk)
            made = chunk.compute_language_model_loss if values is None else token_values(values, vocab_size)
            chunk._postprocess = ChunkedOutput(chunk, tokens or _TOKENS, made)


@contextmanager
def kept_output(chunks: Iterable[Chunk]) -> Iterator[None]:
    """A block after which ``chunks`` make of their hidden states what they made before it."""
    before = [(chunk, {name: vars(chunk).get(name) for name in _OUTPUT}) for chunk in chunks]
    try:
        yield
    finally:
        for chunk, kept in before:
            for name, value in kept.items():
                chunk.__dict__.pop(name, None)
                if value is not None:
                    setattr(chunk, name, value)


def _forget_fusion(model: Chunk) -> None:
    for module in model.output_layer.modules():
        if hasattr(module, "gradient_accumulation_fusion"):  # it looks for main_grad on what is kept
            module.gradient_accumulation_fusion = False
