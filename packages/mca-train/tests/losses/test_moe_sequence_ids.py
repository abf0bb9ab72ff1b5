"""Sequence numbers that routers get with the tokens of their rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses.moe_sequence_ids import pass_sequence_ids


@pytest.mark.parametrize(
    ("first", "cut", "ids"),
    [(False, True, [[1, 1]]), (True, True, [[0, 0, 1, 1]]), (False, False, [[0, 0, 1, 1]])],
)
def test_a_stage_behind_the_first_gets_its_tensor_rank_s_tokens(
    first: bool, cut: bool, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    config = SimpleNamespace(num_moe_experts=2, mtp_num_layers=None, sequence_parallel=cut)
    model: Any = SimpleNamespace(config=config, pre_process=first)
    batch: Any = SimpleNamespace(segments_at_depth=lambda depth=0: torch.tensor([[0, 0, 1, 1]]))
    found = pass_sequence_ids(batch, model)
    assert found is not None
    assert found.tolist() == ids
    config.num_moe_experts = 0
    assert pass_sequence_ids(batch, model) is None
