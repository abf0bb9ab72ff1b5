"""Tokens that an expert with limited capacity keeps."""

import pytest
import torch

from mca_models.megatron import platform


@pytest.mark.parametrize("filled", [False, True])
def test_experts_keep_the_first_tokens(filled: bool) -> None:
    platform.prepare()
    from megatron.core.transformer.moe import moe_utils, router

    scores = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    scores[:, 0] += 0.4  # more than its share chooses the first expert
    sent = torch.zeros(64, 4, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    for module in (moe_utils, router):  # 16 places of each expert
        weights, kept = module.apply_router_token_dropping(scores * sent, sent, 2, 0.5, "position", filled)
        assert torch.equal(weights, scores * (sent & kept))
        for expert in range(4):
            chosen = sent[:, expert].nonzero().flatten()
            assert len(chosen) > 16
            assert torch.equal((sent & kept)[:, expert].nonzero().flatten(), chosen[:16])
