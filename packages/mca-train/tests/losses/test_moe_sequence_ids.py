"""Sequence numbers that routers get with the tokens of their rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses.moe_sequence_ids import _to_planes, decode_sequence_ids, pass_sequence_ids


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


IDS = [[0, 1, 2, -1], [3, 511, 65534, -1]]


def test_ids_pass_an_moe_layer_as_boolean_planes() -> None:
    """Rows are samples before the layer and columns in its router."""
    tokens, logits = torch.tensor(IDS), torch.zeros(4, 2, 8)
    given = ("hidden",), {"padding_mask": tokens, "other": 1}
    args, options = _to_planes(SimpleNamespace(), *given)
    assert args == ("hidden",) and options["other"] == 1
    planes = options["padding_mask"]
    assert planes.dtype == torch.bool and planes.shape == (2, 4, 16)
    assert decode_sequence_ids(planes.transpose(0, 1), logits).tolist() == tokens.T.flatten().tolist()


def test_an_mtp_layer_keeps_its_ids_for_its_router() -> None:
    module = SimpleNamespace(mca_sequence_ids=torch.tensor(IDS))
    _, options = _to_planes(module, (), {})
    assert decode_sequence_ids(options["padding_mask"], torch.zeros(2, 4, 8)).tolist() == [*IDS[0], *IDS[1]]
    plain = torch.tensor([[False, True]])
    assert _to_planes(module, (), {"padding_mask": plain}) == ((), {"padding_mask": plain})
    assert _to_planes(SimpleNamespace(), (), {}) == ((), {})


def test_without_planes_each_row_is_a_sequence() -> None:
    logits = torch.zeros(3, 2, 8)
    assert decode_sequence_ids(None, logits).tolist() == [0, 1] * 3
    mask = torch.tensor([[False, True], [False, False], [True, False]])
    assert decode_sequence_ids(mask, logits).tolist() == [0, -1, 0, 1, -1, 1]
