"""Attention of images that see both ways, against the whole score matrix."""

import pytest
import torch

from mca_models.megatron.layers import sdpa
from mca_models.megatron.layers.sdpa import bidirectional_attention


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(("start", "queries"), [(0, 24), (6, 10)])
@pytest.mark.parametrize("block", [512, 4])
def test_images_see_themselves_and_what_is_before_them(
    window: int | None, start: int, queries: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    length, images = 24, ((0, 4), (9, 14))
    image = torch.full((2, length), -1)
    for number, (first, last) in enumerate(images):
        image[0, first:last] = number
    ends = torch.arange(1, length + 1).repeat(2, 1)
    for first, last in images:
        ends[0, first:last] = last
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2))
    places = torch.arange(length)
    seen = places <= places[:, None]
    seen = seen | ((image[:, :, None] == image[:, None]) & (image[:, None] >= 0))
    if window is not None:
        seen = seen & (places > places[:, None] - window)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    expected = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    own = slice(start, start + queries)
    found = bidirectional_attention(
        q[:, :, own], k, v, ends[:, own], start=start, reach=4, window=window, scale=0.3
    )
    assert torch.allclose(found, expected[:, :, own])
