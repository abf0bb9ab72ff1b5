"""Logits of padded rows of the vocabulary, on a rank's shard and gathered."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron.features.head import _mask_padding


@pytest.mark.parametrize(
    ("rank", "columns", "true"),
    [(0, 4, 4), (1, 4, 2), (0, 8, 6), (1, 8, 6)],
    ids=["first shard", "last shard", "gathered on rank 0", "gathered on rank 1"],
)
def test_padded_rows_alone_have_the_lowest_logits(
    rank: int, columns: int, true: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: group)
    model: Any = SimpleNamespace(post_process=True, output_layer=torch.nn.Identity())
    config: Any = SimpleNamespace(padded_vocab_size=8, vocab_size=6)
    _mask_padding(model, config)
    logits, bias = model.output_layer((torch.zeros(3, columns), None))
    assert bias is None
    assert torch.equal(logits[:, :true], torch.zeros(3, true))
    assert (logits[:, true:] == torch.finfo(torch.float32).min).all()
