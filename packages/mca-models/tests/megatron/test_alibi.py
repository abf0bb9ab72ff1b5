"""ALiBi without a mask: channels that queries and keys are given."""

import pytest
import torch

from mca_models.megatron.layers.attention import add_alibi_channels, alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 25, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    torch.testing.assert_close(alibi_slopes(heads), _get_alibi_slopes(heads, "cpu"))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_scores_grow_with_the_position_of_the_key(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 6, size, 8, generator=generator).to(dtype) for size in (3, 2500))
    ours = [x.float() for x in add_alibi_channels(query, key, alibi_slopes(6), 8**-0.5)]
    scores = (ours[0] @ ours[1].mT - query.float() @ key.float().mT) * 8**-0.5
    expected = alibi_slopes(6).view(1, -1, 1, 1) * torch.arange(2500.0)
    assert float((scores - expected).abs().max()) <= most  # of up to 2000
