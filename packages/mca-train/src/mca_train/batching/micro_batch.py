"""Tensors of a micro-batch and of a training step, as made by `collate`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass on this rank. b: samples, s: tokens of a sample on this rank."""

    input_ids: Tensor
    """``[b, s]``"""
    position_ids: Tensor
    """``[b, s]``, counted over the full sequence (all context-parallel ranks)."""
    labels: Tensor
    """``[b, s]``: the *next* token; 0 where ``loss_mask`` is 0."""
    loss_mask: Tensor
    """``[b, s]`` fp32: 1 for a target, 0 for none."""
    segments: Tensor
    """``[b, s]``: index of the token's sequence in the micro-batch; a preference pair has ``2 * pair`` for chosen and
    ``2 * pair + 1`` for rejected."""
    num_segments: int
    """Number of sequences, over all context-parallel ranks."""
    tokens_remaining: Tensor
    """``[b, s]``: number of tokens that follow in the same sequence; negative for padding, and for all tokens of a
    sample that does not count."""
    cu_seqlens: Tensor | None = None
    """Cumulative lengths of packed sequences, ``[sequences + 1]`` int32, over all context-parallel ranks."""
    sources: Tensor | None = None
    """``[sequences]``: index of each sequence's source in a mixture."""
    longest: int = 0
    """Tokens of the longest sequence that counts, without padding, over all context-parallel ranks."""
    max_seqlen: int = 0
    """Tokens of the longest packed sequence, padding included."""
    values: Tensor | None = None
    """``[num_segments, numbers]`` fp64: extra numbers of each sequence, such as its label; 0 if it has none."""
    sections: Tensor | None = None
    """``[3, b, s]``: M-RoPE positions (time, row, column) with images; ``[3, 1, tokens]`` of the full pack for packed
    sequences. None: text positions."""
    attention_ends: Tensor | None = None
    """``[b, s]``: one past the last token that each token attends to, with bidirectional image attention; None:
    causal."""
    feature_rows: Tensor | None = None
    """``[b, s]``: row of the image features that replaces the token, or -1; on the first pipeline stage, and with MTP
    layers on all."""
    images: Mapping[str, Tensor] | None = None
    """Inputs of the vision tower for all images of the micro-batch; only on the first pipeline stage."""
    has_media: bool = False
    """A sample has images, videos or audio; the same on all pipeline stages."""
    routed_experts: Tensor | None = None
    """``[b, s, layers with experts, topk]`` int16: experts that an engine chose, -1 where the routers choose."""
    image_tokens: int = 0
    """Number of placeholders of images and videos, over all context-parallel ranks."""
    audio_tokens: int = 0
    """Number of placeholders of audio, over all context-parallel ranks."""

    def segments_at_depth(self, depth: int = 0) -> Tensor:
        """Return `segments` ``[b, s]`` of tokens followed by at least ``depth`` others of their sequence, else -1."""
        return self.segments.masked_fill(self.tokens_remaining < depth, -1)

    def target_mask(self, depth: int) -> Tensor:
        """Return the mask ``[b, s]`` bool of targets preceded by at least ``depth`` more tokens of their sequence."""
        return (self.loss_mask > 0) & (self.position_ids >= depth)

    def next_values(self, start: int, count: int) -> Tensor:
        """Return, per token, the number that `values` holds for the *next* token: ``[b, s]`` fp32.

        This aligns per-token numbers, such as old log-probabilities, with the loss on every layout, packed or not.

        Args:
            start: Index in `values` of the first token's number.
            count: Number of tokens with a number; later tokens get 0.
        """
        if self.values is None or self.values.shape[1] < start + count:
            raise McaError(
                f"'values' of samples has fewer than {start + count} numbers, {count} of which are per token"
            )
        place = self.position_ids + 1
        found = self.values[self.segments, start + place.clamp(max=count - 1)]
        return found.float().masked_fill(place >= count, 0)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        yield from (found for f in fields(self) if isinstance(found := getattr(self, f.name), Tensor))
        yield from (self.images or {}).values()

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on ``device``."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in pinned memory."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        values: JsonObject = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: JsonObject = {k: change(v) for k, v in values.items() if isinstance(v, Tensor)}
        if self.images is not None:
            changed["images"] = {k: change(v) for k, v in self.images.items()}
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Micro-batches of one training step or one evaluation round on this data-parallel rank."""

    micro_batches: tuple[MicroBatch, ...]
    seq_length: int
    """Tokens of each sample before context-parallel slicing."""
    num_samples: int
    """Samples that count on this data-parallel rank."""
    num_tokens: int
    """Tokens without padding on this data-parallel rank."""
    squares: int
    """Sum of the squared lengths of all counted sequences, which the cost of causal attention is proportional to."""
    checksum: int = 0
    """Checksum of all tokens and labels before context-parallel slicing; equal on all ranks of a replica."""
    kl_batch: "StepBatch | None" = None
    """KTO's mismatched prompt-completion pairs of the same samples, in the same number of micro-batches."""

    @property
    def has_media(self) -> bool:
        """A sample has images, videos or audio; the same on all ranks of a replica."""
        return any(batch.has_media for batch in self.micro_batches)

    @property
    def image_tokens(self) -> int:
        """Tokens of images and videos on this data-parallel rank."""
        return sum(batch.image_tokens for batch in self.micro_batches)

    @property
    def audio_tokens(self) -> int:
        """Tokens of audio on this data-parallel rank."""
        return sum(batch.audio_tokens for batch in self.micro_batches)

    def without_routed_experts(self) -> "StepBatch":
        """Return a copy for a model with other routers, which then choose their experts."""
        return self._with(lambda micro: replace(micro, routed_experts=None))

    def pin_memory(self) -> "StepBatch":
        """Return a copy in pinned memory; data loaders call this."""
        return self._with(MicroBatch.pin_memory)

    def _with(self, change: Callable[[MicroBatch], MicroBatch]) -> "StepBatch":
        kl_batch = None if self.kl_batch is None else self.kl_batch._with(change)
        return replace(self, micro_batches=tuple(map(change, self.micro_batches)), kl_batch=kl_batch)

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return int(self.micro_batches[0].input_ids.shape[0])
