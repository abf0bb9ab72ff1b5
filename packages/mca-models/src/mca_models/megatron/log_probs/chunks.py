"""Values of tokens from logits, computed in chunks of tokens, so that a micro-batch's logits are never stored in full.

The output layer and the functions after it run on a few tokens, discard their activations, and run again in the
backward pass. So the memory of the logits and their derivatives (``tokens x vocabulary / tp``) shrinks to that of one
chunk, for one more product with the output matrix. Vocabulary and sequence parallelism, the masked padding of the
vocabulary, factors on logits and adapters work as without chunks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mca_models.megatron.types import GptModel, Upstream

Values = Callable[[Tensor, Tensor], Tensor]
"""``(labels [b, n], logits [n, b, vocab / tp])`` to ``[..., b, n]``."""


_OUTPUT = ("_postprocess", "compute_language_model_loss")
"""Methods of a chunk that callers replace."""


class ChunkedOutput:
    """Replacement for a ``GPTModel``'s ``_postprocess``.

    Args:
        model: The chunk with the output layer.
        tokens: Number of tokens per chunk.
        values: Function of labels and logits.
    """

    def __init__(self, model: GptModel, tokens: int, values: Values) -> None:
        self._model, self._plain, self._tokens, self._values = model, model._postprocess, tokens, values

    def __call__(self, *, hidden_states: Tensor, labels: Tensor | None, **rest: Upstream) -> Tensor:
        """Map ``hidden_states [s / ranks, b, h]`` and ``labels [b, s]`` to values of each token ``[..., b, s]``.

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
        by_rank = labels.reshape(len(labels), -1, rows)  # the tokens of each rank
        step = max(self._tokens * rows // labels.numel(), 1)
        chunks = [
            checkpoint(
                self._compute_chunk, hidden, part, weight, use_reentrant=False, context_fn=_recompute_contexts
            )
            for hidden, part in zip(hidden_states.split(step), by_rank.split(step, 2), strict=True)
        ]
        values = torch.cat(chunks, -1)
        return values.reshape(*values.shape[:-3], *labels.shape)

    def _compute_chunk(self, hidden: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """Compute values from ``hidden [c, b, h]`` on each rank and ``labels [b, ranks, c]`` of all."""
        logits, _ = self._model.output_layer(hidden, weight=weight)
        values = self._values(labels.flatten(1), logits)
        return values.view(*values.shape[:-2], *labels.shape)


@contextmanager
def preserved_output(chunks: Iterable[GptModel]) -> Iterator[None]:
    """Restore the output methods of ``chunks`` after the block."""
    before = [(chunk, {name: vars(chunk).get(name) for name in _OUTPUT}) for chunk in chunks]
    try:
        yield
    finally:
        for chunk, kept in before:
            for name, value in kept.items():
                chunk.__dict__.pop(name, None)
                if value is not None:
                    setattr(chunk, name, value)


def _recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for forward and recomputation; torch does not restore Megatron's random states."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return nullcontext(), _rng_states(get_cuda_rng_tracker().get_states())


@contextmanager
def _rng_states(states: dict[str, Tensor]) -> Iterator[None]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    running = tracker.get_states()
    tracker.set_states(dict(states))  # the tracker replaces states, it does not write into them
    try:
        yield
    finally:
        tracker.set_states(running)


def token_values(values: Callable[[Tensor, Tensor, int], Tensor], vocab_size: int) -> Values:
    """Adapt ``values`` (a ``vocabulary.TokenValues``) to the axis order of Megatron's tensors."""

    def compute(labels: Tensor, logits: Tensor) -> Tensor:
        return values(logits, labels.transpose(0, 1), vocab_size).transpose(-1, -2)

    return compute
