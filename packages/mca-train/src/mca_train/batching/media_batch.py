"""Image and audio tensors of a micro-batch of samples.

`sequence_media` joins them per micro-batch and slices them like the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.sequence_media import Cut, MediaJoiner, media_joiner
from mca_train.batching.micro_batch import MicroBatch
from mca_train.types import Sample


@dataclass(frozen=True, kw_only=True)
class ImageBatching(MediaJoiner):
    """Image options of this rank."""

    def add_images(
        self, batch: MicroBatch, sequences: Sequence[tuple[Sample, bool]], lengths: Sequence[int], cut: Cut
    ) -> MicroBatch:
        """Return ``batch`` with the images of ``sequences``, each padded to one of ``lengths``.

        Sequences that do not count keep their images, but their image tokens are not counted.
        """
        found = [sequence["images"] if "images" in sequence else None for sequence, _ in sequences]
        if not any(found):
            return batch
        counted = [
            place
            for images, (_, counts) in zip(found, sequences, strict=True)
            for place in (images.places if images and counts else ())
        ]
        image_tokens, audio_tokens = (
            sum(place.tokens for place in counted if place.medium == medium) for medium in ("image", "audio")
        )
        made = self.join(found, lengths, cut, packed=batch.cu_seqlens is not None)
        return replace(
            batch,
            image_tokens=image_tokens,
            audio_tokens=audio_tokens,
            sections=made.sections,
            attention_ends=made.attention_ends,
            feature_rows=made.feature_rows,
            images=made.images,
            has_media=True,
        )


def image_batching(config: McaModelConfig, *, decodes: bool) -> ImageBatching:
    """Return the image options of a pipeline stage; see `MediaJoiner` for ``decodes``."""
    return ImageBatching(**vars(media_joiner(config, decodes=decodes)))
