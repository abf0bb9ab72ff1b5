"""Images of a micro-batch: what a chunk takes of them beside tokens.

Where images stand is known of each sequence; here it is said of the micro-batch, and cut as its tokens are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.images import attention_ends, feature_rows, placeholders, positions
from mca_models.megatron.families.image_limits import image_reach
from mca_train.batching.collator_output import ImageFormat
from mca_train.batching.micro_batch import MicroBatch
from mca_train.types import Sample

Cut = Callable[[Tensor, int], Tensor]
"""From a whole tensor and an axis to this context rank's part."""


@dataclass(frozen=True, kw_only=True)
class ImageBatching:
    """How this rank takes images.

    Args:
        decodes: It holds the first stage, which has the vision model: only there pixels are read.
        sections: The model's tokens have three positions each.
        both_ways: The tokens of an image see one another.
        format: How images appear in a batch of a user's collator; None: the model takes none there.
    """

    decodes: bool = True
    sections: bool = False
    both_ways: bool = False
    format: ImageFormat | None = None

    def added(
        self, batch: MicroBatch, sequences: Sequence[tuple[Sample, bool]], lengths: Sequence[int], cut: Cut
    ) -> MicroBatch:
        """``batch`` with the images of its ``sequences``, each padded to one of ``lengths``; as it is without any.

        Those that do not count bring their images along, and their tokens are not counted.

        Packed sequences stand in one row, and their positions are those of the whole row on every context rank.
        """
        found = [sequence["images"] if "images" in sequence else None for sequence, _ in sequences]
        if not any(found):
            return batch
        counted = [
            images.tokens for images, (_, counts) in zip(found, sequences, strict=True) if images and counts
        ]
        found += [None] * (len(lengths) - len(found))  # what fills a pack up
        packed = batch.cu_seqlens is not None
        made = replace(batch, image_tokens=sum(counted))
        if self.sections:
            whole = [
                torch.from_numpy(positions(length, images.places if images else ()))
                for images, length in zip(found, lengths, strict=True)
            ]
            by_row = torch.cat(whole, 1)[:, None] if packed else cut(torch.stack(whole, 1), 2)
            made = replace(made, sections=by_row)
        if self.both_ways:
            ends = [
                cut(torch.from_numpy(attention_ends(length, images.places if images else ()))[None], 1)
                for images, length in zip(found, lengths, strict=True)
            ]
            made = replace(made, attention_ends=torch.cat(ends, 1 if packed else 0))
        if not self.decodes:
            return made
        first, rows = 0, []
        for images, length in zip(found, lengths, strict=True):
            rows.append(cut(torch.from_numpy(_rows(images, length, first))[None], 1))
            first += images.tokens if images else 0
        read = [images.tensors() for images in found if images]
        return replace(
            made,
            feature_rows=torch.cat(rows, 1 if packed else 0),
            images={name: torch.cat(_of_one_size([each[name] for each in read])) for name in read[0]},
        )


def image_batching(config: McaModelConfig, *, decodes: bool) -> ImageBatching:
    """How the ranks of a stage take the images of a model; ``decodes`` see there."""
    return ImageBatching(
        decodes=decodes,
        sections=config.mrope_section is not None,
        both_ways=image_reach(config) > 0,
        format=_image_format(config),
    )


def _image_format(config: McaModelConfig) -> ImageFormat | None:
    """Return how Qwen's and GLM's processors lay images out, for models whose vision part says how patches merge."""
    token = placeholders(config.vision).get("image")
    merge = ((config.vision or {}).get("vision_config") or {}).get("spatial_merge_size")
    return None if token is None or merge is None else ImageFormat(token=token, merge=int(merge))


def _rows(images: Sample | None, length: int, first: int) -> Sample:
    return feature_rows(length, () if images is None else images.places, first)


def _of_one_size(read: Sequence[Tensor]) -> list[Tensor]:
    """Pixels of whole images ``[images, channels, height, width]``, filled up to the largest; other tensors stay."""
    if read[0].dim() != 4:
        return list(read)
    high, wide = (max(each.shape[axis] for each in read) for axis in (2, 3))
    return [
        torch.nn.functional.pad(each, (0, wide - each.shape[3], 0, high - each.shape[2])) for each in read
    ]
