"""Padded lengths of rows whose log-probabilities are computed, and the sums of a fingerprint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron.log_probs.forward import _Rows
from mca_models.megatron.state import fingerprint
from mca_models.megatron.state.fingerprint import _sum


def test_rows_are_padded_to_the_next_multiple():
    rows: Any = SimpleNamespace(_multiple=8)
    assert [_Rows._padded(rows, tokens) for tokens in (1, 7, 8, 9, 16)] == [8, 8, 8, 16, 16]


def test_the_sum_of_a_parameter_has_64_bits():
    torch.manual_seed(0)
    found = [int(_sum(torch.rand(10))) for _ in range(20)]
    assert max(map(abs, found)) > 2**60
    assert len(set(found)) == 20


@pytest.mark.parametrize(("rank", "rows"), [(0, 4), (1, 4), (2, 2), (3, 0)])
def test_a_fingerprint_leaves_out_padded_rows_of_the_vocabulary(
    rank: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "shard_rank_and_size", lambda *_: (rank, 4))
    models: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=10, layout=None), rank_context=SimpleNamespace(coordinates=None)
    )
    tensor = torch.zeros(4, 2)

    def param(vocab: bool) -> Any:
        return SimpleNamespace(vocab=vocab)

    assert len(fingerprint._true_rows(param(True), tensor, models)) == rows
    assert len(fingerprint._true_rows(param(False), tensor, models)) == 4
