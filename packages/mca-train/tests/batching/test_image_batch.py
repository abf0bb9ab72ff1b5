"""Images of several sequences joined to the tensors of a micro-batch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mca_models.images import ImageSpan
from mca_train.batching.image_batch import ImageBatching
from mca_train.data.sample_images import SampleImages


@dataclass(frozen=True)
class Batch:
    cu_seqlens: torch.Tensor | None
    image_tokens: int = 0
    attention_ends: torch.Tensor | None = None


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_are_rows_of_a_batch_and_follow_each_other_in_a_pack(packed: bool) -> None:
    images = SampleImages(places=(ImageSpan(1, 1, 2),), tensors=dict)
    batch: Any = Batch(torch.tensor([0, 4, 8]) if packed else None)
    joined = ImageBatching(decodes=False, bidirectional=True).add_images(
        batch, [({"images": images}, True), ({}, True)], [4, 4], lambda tensor, axis: tensor
    )
    rows = [[1, 3, 3, 4], [1, 2, 3, 4]]
    assert joined.attention_ends is not None
    assert joined.attention_ends.tolist() == ([[*rows[0], *rows[1]]] if packed else rows)
