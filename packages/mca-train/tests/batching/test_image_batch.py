"""Images of several sequences joined to the tensors of a micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mca_models.media import ImageSpan
from mca_models.megatron.features.sequence_media import MediaJoiner
from mca_train.batching.collate import add_media
from mca_train.data.sample_images import SampleImages


def whole(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the full tensor, as on one context-parallel rank."""
    return tensor


@dataclass(frozen=True)
class Batch:
    cu_seqlens: torch.Tensor | None
    image_tokens: int = 0
    audio_tokens: int = 0
    sections: torch.Tensor | None = None
    attention_ends: torch.Tensor | None = None
    feature_rows: torch.Tensor | None = None
    images: Mapping[str, torch.Tensor] | None = None
    has_media: bool = False


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_are_rows_of_a_batch_and_follow_each_other_in_a_pack(packed: bool) -> None:
    images = SampleImages(places=(ImageSpan(1, 1, 2),), tensors=dict)
    batch: Any = Batch(torch.tensor([0, 4, 8]) if packed else None)
    joined = add_media(
        batch,
        MediaJoiner(decodes=False, bidirectional=True),
        [({"images": images}, True), ({}, True)],
        [4, 4],
        whole,
    )
    rows = [[1, 3, 3, 4], [1, 2, 3, 4]]
    assert joined.attention_ends is not None
    assert joined.attention_ends.tolist() == ([[*rows[0], *rows[1]]] if packed else rows)
    assert joined.has_media and joined.feature_rows is None


def test_stages_with_mtp_layers_get_the_rows_of_features_without_pixels() -> None:
    images = SampleImages(places=(ImageSpan(1, 1, 2),), tensors=dict)
    batch: Any = Batch(None)
    joined = add_media(
        batch,
        MediaJoiner(decodes=False, predicts=True),
        [({}, True), ({"images": images}, True)],
        [3, 3],
        whole,
    )
    assert joined.images is None and joined.feature_rows is not None
    assert joined.feature_rows.tolist() == [[-1, -1, -1], [-1, 0, 1]]


def test_pixels_of_images_are_padded_at_the_bottom_and_at_the_right() -> None:
    low_and_wide, high = torch.ones(1, 1, 2, 3), torch.ones(2, 1, 4, 1)
    batch: Any = Batch(None)
    joined = add_media(
        batch,
        MediaJoiner(decodes=True),
        [
            ({"images": SampleImages(places=(), tensors=lambda pixels=pixels: {"pixels": pixels})}, True)
            for pixels in (low_and_wide, high)
        ],
        [4, 4],
        whole,
    )
    assert joined.images is not None
    pixels = joined.images["pixels"]
    assert pixels.shape == (3, 1, 4, 3)
    assert torch.equal(pixels[0, 0], torch.tensor([[1.0] * 3] * 2 + [[0.0] * 3] * 2))
    assert torch.equal(pixels[2, 0], torch.tensor([[1.0, 0.0, 0.0]] * 4))
