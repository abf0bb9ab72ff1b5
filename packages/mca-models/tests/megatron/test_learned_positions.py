"""Positions that a model has not learned are refused before a device is asked for them, and padding takes none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.megatron import forward
from mca_models.megatron.log_probs import forward as log_probs
from mca_models.templates import config_from_hf

MODEL: Any = SimpleNamespace(
    config=config_from_hf(
        {"model_type": "gpt2", "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16}
    ),
    rank_context=SimpleNamespace(layout=ParallelLayout(), coordinates=SimpleNamespace(dp=0)),
)


def test_sequences_beyond_them_are_refused_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a sequence of 5 tokens is longer than the model's 4 learned positions"
    monkeypatch.setattr(forward, "run_on_all_ranks_unwrapped", lambda check: [check()])
    with pytest.raises(McaError, match=said):
        forward.model_logits(MODEL, torch.zeros(1, 5, dtype=torch.int64))
    batch: Any = SimpleNamespace(
        located_media=lambda models: [],
        positions=lambda: [torch.arange(5)],
        input_ids=torch.zeros(1, 5),
        packed=False,
    )
    monkeypatch.setattr(log_probs, "run_on_all_ranks_unwrapped", lambda look: look())
    with pytest.raises(McaError, match=said):
        log_probs._checked_batch(MODEL, lambda: batch)


def test_padding_takes_the_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(forward.parallel, "context_group", lambda: alone)
    chunk: Any = SimpleNamespace(pre_process=True, parameters=lambda: iter([torch.zeros(1)]))
    (micro,) = forward._micro(MODEL, chunk, torch.zeros(1, 6), 1, 4, [None])
    assert micro["position_ids"].tolist() == [[0, 1, 2, 3, 3, 3]]
    rows: Any = SimpleNamespace(
        _sequence_rows=lambda number: [(0, 0, torch.arange(3)), (0, 4, torch.arange(2))],
        _batch=SimpleNamespace(packed=True),
        _device=torch.device("cpu"),
    )
    assert log_probs._Rows._positions(rows, 0, (4, 2, 3)).tolist() == [0, 1, 2, 2, 0, 1, 0, 0, 0]
