"""The tensors of a micro-batch and of a training step. How they are made is in `collate`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes on this rank. b: samples, s: tokens of a sample on this rank."""

    input_ids: Tensor
    """``[b, s]``"""
    position_ids: Tensor
    """``[b, s]``, counted over the whole sample (all context-parallel ranks)."""
    labels: Tensor
    """``[b, s]``: the *next* token; 0 where ``loss_mask`` is 0."""
    loss_mask: Tensor
    """``[b, s]`` fp32: 1 for a target, 0 for none."""
    segments: Tensor
    """``[b, s]``: which sequence of the micro-batch a token belongs to; of a preference pair the chosen one
    is ``2 * pair``, the rejected one ``2 * pair + 1``."""
    num_segments: int
    """Sequences, over all context-parallel ranks."""
    following: Tensor
    """``[b, s]``: how many tokens of its own sequence stand after a token; below 0 for padding, and for all tokens
    of a sample that does not count."""
    cu_seqlens: Tensor | None = None
    """Packed sequences: where each begins in the whole pack, and its end, ``[sequences + 1]`` int32."""
    sources: Tensor | None = None
    """``[sequences]``: of a mixture, which source each sequence is from."""
    longest: int = 0
    """Tokens of the longest sequence that counts, without padding, over all context-parallel ranks."""
    max_seqlen: int = 0
    """Tokens of the longest packed sequence, padding included."""
    values: Tensor | None = None
    """``[num_segments, numbers]`` fp64: what samples say of each of their sequences, such as a label; 0 for none."""
    sections: Tensor | None = None
    """``[3, b, s]``: time, row and column of each token where there are images; of packed sequences ``[3, 1, tokens]``
    of the whole pack. None: positions are those of text."""
    attention_ends: Tensor | None = None
    """``[b, s]``: how many tokens of its sequence there are up to the last that a token sees, where there are images
    that see both ways; None: each sees itself and what is before it."""
    feature_rows: Tensor | None = None
    """``[b, s]``: of which feature of `images` a token is the placeholder, or -1; only on the first stage."""
    images: Mapping[str, Tensor] | None = None
    """What the vision model takes of all images of the micro-batch; only on the first stage."""
    image_tokens: int = 0
    """Placeholders, over all context-parallel ranks."""

    def counted(self, depth: int = 0) -> Tensor:
        """``[b, s]``: `segments` of the tokens with ``depth`` of their sequence after them; -1 for all others."""
        return self.segments.masked_fill(self.following < depth, -1)

    def targets_at(self, depth: int) -> Tensor:
        """``[b, s]`` bool: the targets with ``depth`` more tokens of their sequence before them."""
        return (self.loss_mask > 0) & (self.position_ids >= depth)

    def next_values(self, start: int, count: int) -> Tensor:
        """``[b, s]`` fp32: of ``count`` numbers, one for each token of a sequence, that of the *next* token.

        On every layout, packed or not, so stand old log-probabilities beside those of a loss.

        Args:
            start: Which of a sequence's `values` its first token's is.
            count: Tokens that have one; what stands behind them gets 0.
        """
        if self.values is None or self.values.shape[1] < start + count:
            raise McaError(f"samples have no {start + count} numbers in 'values', {count} of them of tokens")
        place = self.position_ids + 1
        found = self.values[self.segments, start + place.clamp(max=count - 1)]
        return found.float().masked_fill(place >= count, 0)

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield from (found for f in fields(self) if isinstance(found := getattr(self, f.name), Tensor))
        yield from (self.images or {}).values()

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on ``device``."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """The same in memory that a GPU copies from by itself."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        values: JsonObject = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: JsonObject = {k: change(v) for k, v in values.items() if isinstance(v, Tensor)}
        if self.images is not None:
            changed["images"] = {k: change(v) for k, v in self.images.items()}
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The micro-batches of one step (or of one evaluation round) on this data-parallel rank."""

    micro_batches: tuple[MicroBatch, ...]
    seq_length: int
    """Tokens of a sample before context-parallel slicing; the same for all of them."""
    num_samples: int
    """Samples that count, of this data-parallel rank."""
    num_tokens: int
    """Tokens that are not padding, of this data-parallel rank."""
    squares: int
    """Of the lengths of all sequences that count, summed: what causal attention costs."""
    checksum: int = 0
    """Of all tokens and labels before context-parallel slicing: the same on all ranks that share them."""
    beside: "StepBatch | None" = None
    """Other sequences of the same samples, in as many micro-batches: mismatched answers, by which kto measures."""

    @property
    def image_tokens(self) -> int:
        """Tokens that are images', of this data-parallel rank."""
        return sum(batch.image_tokens for batch in self.micro_batches)

    def pin_memory(self) -> "StepBatch":
        """The same in memory that a GPU copies from by itself; data loaders call it."""
        beside = None if self.beside is None else self.beside.pin_memory()
        pinned = tuple(micro.pin_memory() for micro in self.micro_batches)
        return replace(self, micro_batches=pinned, beside=beside)

    @property
    def micro_batch_size(self) -> int:
        """Samples of each micro-batch."""
        return int(self.micro_batches[0].input_ids.shape[0])
