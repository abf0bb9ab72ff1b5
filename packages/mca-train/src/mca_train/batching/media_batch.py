"""Image and audio tensors of a micro-batch: positions, feature rows, pixels and spectrograms.

The image spans are known per sequence; this module joins them per micro-batch and slices them like the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.media import attention_ends, feature_rows_of_batch, positions
from mca_models.megatron.features.media import image_reach
from mca_train.batching.micro_batch import MicroBatch
from mca_train.data.image_tokens import join_tensors
from mca_train.types import Sample

Cut = Callable[[Tensor, int], Tensor]
"""Function from a full tensor and an axis to the shard of this context-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class ImageBatching:
    """Image options of this rank.

    Args:
        decodes: Read pixels: this rank has the first pipeline stage, which contains the vision tower.
        sections: Tokens have three positions each (M-RoPE).
        bidirectional: The tokens of an image attend to each other in both directions.
    """

    decodes: bool = True
    sections: bool = False
    bidirectional: bool = False

    def add_images(
        self, batch: MicroBatch, sequences: Sequence[tuple[Sample, bool]], lengths: Sequence[int], cut: Cut
    ) -> MicroBatch:
        """Return ``batch`` with the images of ``sequences``, each padded to one of ``lengths``.

        Sequences that do not count keep their images, but their image tokens are not counted.

        Packed sequences share one row; its positions are those of the whole row on every context-parallel rank.
        """
        found = [sequence["images"] if "images" in sequence else None for sequence, _ in sequences]
        if not any(found):
            return batch
        counted = [
            place
            for images, (_, counts) in zip(found, sequences, strict=True)
            for place in (images.places if images and counts else ())
        ]
        found += [None] * (len(lengths) - len(found))  # padding of a pack
        packed = batch.cu_seqlens is not None
        seen, heard = (
            sum(place.tokens for place in counted if place.medium == medium) for medium in ("image", "audio")
        )
        made = replace(batch, image_tokens=seen, audio_tokens=heard)
        if self.sections:
            whole = [
                torch.from_numpy(positions(length, images.places if images else ()))
                for images, length in zip(found, lengths, strict=True)
            ]
            if any(each.is_floating_point() for each in whole):  # exact times of frames
                whole = [each.float() for each in whole]
            by_row = torch.cat(whole, 1)[:, None] if packed else cut(torch.stack(whole, 1), 2)
            made = replace(made, sections=by_row)
        if self.bidirectional:
            ends = [
                cut(torch.from_numpy(attention_ends(length, images.places if images else ()))[None], 1)
                for images, length in zip(found, lengths, strict=True)
            ]
            made = replace(made, attention_ends=torch.cat(ends, 1 if packed else 0))
        if not self.decodes:
            return made
        spans = [images.places if images else () for images in found]
        rows = [cut(torch.from_numpy(own)[None], 1) for own in feature_rows_of_batch(lengths, spans)]
        read = [images.tensors() for images in found if images]
        return replace(
            made,
            feature_rows=torch.cat(rows, 1 if packed else 0),
            images=join_tensors(read),
        )


def image_batching(config: McaModelConfig, *, decodes: bool) -> ImageBatching:
    """Return the image options of a pipeline stage; see `ImageBatching` for ``decodes``."""
    return ImageBatching(
        decodes=decodes, sections=config.mrope is not None, bidirectional=image_reach(config) > 0
    )
