"""Media of the sequences of a micro-batch, joined to the arguments that a chunk takes for them.

Positions of images are known per sequence; they are padded, packed and sharded like the tokens. `media` takes these
arguments, and `processor_media` finds the positions from a processor's outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import ImageSpan, attention_ends, batch_feature_rows, positions
from mca_models.megatron.features.media import image_reach

Cut = Callable[[Tensor, int], Tensor]
"""Function from a full tensor and an axis to the shard of this context-parallel rank."""
_PADDING = {"image_position_ids": -1}
"""Values of padding other than 0."""


class SequenceMedia(Protocol):
    """Images, videos and audio clips of one sequence."""

    @property
    def places(self) -> tuple[ImageSpan, ...]:
        """Locations among its tokens, in order."""

    @property
    def tensors(self) -> Callable[[], Mapping[str, Tensor]]:
        """Function that returns the inputs of the towers."""


@dataclass(frozen=True, kw_only=True)
class MediaArguments:
    """Arguments of a chunk for the media of a micro-batch; see `media`."""

    sections: Tensor | None = None
    """Positions on three axes, ``[3, b, s]`` of this rank, or ``[3, 1, t]`` of a full pack; None: one axis."""
    attention_ends: Tensor | None = None
    feature_rows: Tensor | None = None
    images: Mapping[str, Tensor] | None = None

    def keywords(self, dtype: torch.dtype) -> JsonObject:
        """Return the arguments without positions, with pixels in ``dtype``."""
        ends: JsonObject = {} if self.attention_ends is None else {"attention_ends": self.attention_ends}
        if self.feature_rows is not None:
            ends["feature_rows"] = self.feature_rows
        if self.images is None:
            return ends
        images = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.images.items()}
        return {"images": images, **ends}

    def to(self, device: torch.device) -> "MediaArguments":
        """Return the arguments on ``device``."""
        return MediaArguments(
            sections=None if self.sections is None else self.sections.to(device),
            attention_ends=None if self.attention_ends is None else self.attention_ends.to(device),
            feature_rows=None if self.feature_rows is None else self.feature_rows.to(device),
            images=None if self.images is None else {name: x.to(device) for name, x in self.images.items()},
        )


@dataclass(frozen=True, kw_only=True)
class MediaJoiner:
    """Function from the media of sequences to the arguments of a chunk.

    Args:
        decodes: Read pixels: this rank has the first pipeline stage, which contains the towers.
        sections: Tokens have three positions each (M-RoPE).
        bidirectional: The tokens of an image attend to each other in both directions.
        predicts: The model has MTP layers, whose stage needs the rows of features too.
    """

    decodes: bool = True
    sections: bool = False
    bidirectional: bool = False
    predicts: bool = False

    def join(
        self, found: Sequence[SequenceMedia | None], lengths: Sequence[int], cut: Cut, *, packed: bool
    ) -> MediaArguments:
        """Return the arguments for the media ``found`` of sequences padded to ``lengths``.

        Packed sequences share one row; its positions are those of the whole row on every context-parallel rank.
        """
        if not any(found):
            return MediaArguments()
        found = [*found, *[None] * (len(lengths) - len(found))]  # padding of a pack
        spans = [media.places if media else () for media in found]
        by_row = ends = None
        if self.sections:
            whole = [
                torch.from_numpy(positions(length, own)) for own, length in zip(spans, lengths, strict=True)
            ]
            if any(each.is_floating_point() for each in whole):  # exact times of frames
                whole = [each.float() for each in whole]
            by_row = torch.cat(whole, 1)[:, None] if packed else cut(torch.stack(whole, 1), 2)
        if self.bidirectional:
            each_end = [
                cut(torch.from_numpy(attention_ends(length, own))[None], 1)
                for own, length in zip(spans, lengths, strict=True)
            ]
            ends = torch.cat(each_end, 1 if packed else 0)
        rows = None
        if self.decodes or self.predicts:
            own_rows = [cut(torch.from_numpy(own)[None], 1) for own in batch_feature_rows(lengths, spans)]
            rows = torch.cat(own_rows, 1 if packed else 0)
        images = join_tensors([media.tensors() for media in found if media]) if self.decodes else None
        return MediaArguments(sections=by_row, attention_ends=ends, feature_rows=rows, images=images)


def media_joiner(config: McaModelConfig, *, decodes: bool) -> MediaJoiner:
    """Return the joiner of a pipeline stage; see `MediaJoiner` for ``decodes``."""
    return MediaJoiner(
        decodes=decodes,
        sections=config.mrope is not None,
        bidirectional=image_reach(config) > 0,
        predicts=config.mtp_num_layers > 0,
    )


def join_tensors(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of all parts by name; a part may have some of the names.

    Pixels, spectrograms and masks are padded to the largest in all axes but the first.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: torch.cat(
            _pad_to_largest([part[name] for part in parts if name in part], _PADDING.get(name, 0))
        )
        for name in names
    }


def _pad_to_largest(read: Sequence[Tensor], value: int) -> list[Tensor]:
    largest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in read), strict=True)]
    return [_padded(each, largest, value) for each in read]


def _padded(tensor: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
    padding = [pad for own in reversed(missing) for pad in (0, own)]
    return torch.nn.functional.pad(tensor, padding, value=value) if any(missing) else tensor
