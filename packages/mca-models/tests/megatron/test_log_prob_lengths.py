"""Padded lengths of rows whose log-probabilities are computed, and the sums of a fingerprint."""

from types import SimpleNamespace
from typing import Any

import torch

from mca_models.megatron.log_probs.forward import _Rows
from mca_models.megatron.state.fingerprint import _sum


def test_rows_are_padded_to_the_next_multiple():
    rows: Any = SimpleNamespace(_multiple=8)
    assert [_Rows._padded(rows, tokens) for tokens in (1, 7, 8, 9, 16)] == [8, 8, 8, 16, 16]


def test_the_sum_of_a_parameter_has_64_bits():
    torch.manual_seed(0)
    found = [int(_sum(torch.rand(10))) for _ in range(20)]
    assert max(map(abs, found)) > 2**60
    assert len(set(found)) == 20
