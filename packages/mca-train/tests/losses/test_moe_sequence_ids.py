"""Sequence numbers that routers get with the tokens of their rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses.moe_aux import (
    _to_planes,
    decode_sequence_ids,
    mtp_router_depths,
    pass_sequence_ids,
    propagate_sequence_ids,
)


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


class Router(torch.nn.Module):
    """Stand-in for Megatron's router."""


class Experts(torch.nn.Module):
    """Stand-in for Megatron's MoE layer, which returns the mask that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, hidden: Any, padding_mask: Any = None) -> Any:
        return padding_mask


class Prediction(torch.nn.Module):
    """Stand-in for an MTP layer of megatron-core 0.19."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def _get_embeddings(self, ids: Any, positions: Any, padding_mask: Any = None) -> tuple[Any, ...]:
        return ids, positions, padding_mask, "embedding", "hidden"


class OlderPrediction(Prediction):
    """Stand-in for an MTP layer of megatron-core 0.16, which has no mask."""

    def _get_embeddings(self, ids: Any, positions: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return ids, positions, "embedding", "hidden"

    def forward(self, hidden: Any, **options: Any) -> Any:
        return self._proj_and_transformer_layer(hidden, **options)

    def _proj_and_transformer_layer(self, hidden: Any, fails: bool = False) -> Any:
        if fails:
            raise KeyError
        return self.experts(hidden)


class Model(torch.nn.Module):
    """A decoder layer with experts, and two MTP layers."""

    def __init__(self, layer: type[Prediction]) -> None:
        super().__init__()
        self.decoder, self.mtp = Experts(), torch.nn.ModuleList([layer(), layer()])
        self.pre_process: Any = True
        self.config: Any = SimpleNamespace(num_moe_experts=2, mtp_num_layers=2, sequence_parallel=False)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    platform.prepare()
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_layer, router

    monkeypatch.setattr(multi_token_prediction, "MultiTokenPredictionLayer", Prediction)
    monkeypatch.setattr(moe_layer, "MoELayer", Experts)
    monkeypatch.setattr(router, "TopKRouter", Router)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("layers", [2, None])
def test_each_mtp_layer_gets_the_ids_of_its_depth(stand_ins: None, cut: bool, layers: int | None) -> None:
    """The first stage splits the mask of the decoder itself, and no stage that of MTP layers."""
    model = Model(Prediction)
    model.config.sequence_parallel, model.config.mtp_num_layers = cut, layers
    batch: Any = SimpleNamespace(segments_at_depth=lambda depth=0: torch.tensor([[0, 1, 2, 3]]) + 10 * depth)
    found = pass_sequence_ids(batch, model)
    assert found is not None and found.tolist() == [[0, 1, 2, 3]]
    for depth, layer in enumerate(model.mtp, 1):
        ids = [10 * depth + number for number in range(4)]
        own = vars(layer).get("mca_sequence_ids")
        assert layers is None if own is None else own.tolist() == [ids[2:] if cut else ids]


def test_routers_of_mtp_layers_have_the_depth_of_their_layer(stand_ins: None) -> None:
    model = Model(Prediction)
    assert mtp_router_depths(model) == {
        layer.experts.router: depth for depth, layer in enumerate(model.mtp, 1)
    }


def decoded(planes: Any) -> list[int]:
    return decode_sequence_ids(planes.transpose(0, 1), torch.zeros(4, 1, 2)).tolist()


def test_an_mtp_layer_with_a_mask_takes_its_ids_once_as_the_mask(stand_ins: None) -> None:
    model = Model(Prediction)
    propagate_sequence_ids(model)
    layer: Any = model.mtp[1]
    layer.mca_sequence_ids = "ids of depth 2"
    rest = ("embedding", "hidden")
    assert layer._get_embeddings("a", "b", padding_mask="theirs") == ("a", "b", "ids of depth 2", *rest)
    assert layer._get_embeddings("a", "b") == ("a", "b", None, *rest)
    assert "forward" not in vars(layer)
    ids = torch.tensor([[0, 1, 5, -1]])
    assert decoded(model.decoder(None, padding_mask=ids)) == [0, 1, 5, -1], "the decoder's layer too"


def test_an_mtp_layer_without_a_mask_recomputes_with_the_ids_of_its_micro_batch(stand_ins: None) -> None:
    model = Model(OlderPrediction)
    propagate_sequence_ids(model)
    layer: Any = model.mtp[0]
    recomputations = []
    for ids in ([0, 0, 1, -1], [0, 2, 2, -1]):
        layer.mca_sequence_ids = torch.tensor([ids])
        assert decoded(layer("hidden")) == ids
        assert "mca_sequence_ids" not in vars(layer) and layer.experts.mca_sequence_ids is None
        recomputations.append(layer._proj_and_transformer_layer)
    assert decoded(recomputations[0]("hidden")) == [0, 0, 1, -1]
    with pytest.raises(KeyError):
        layer._proj_and_transformer_layer("hidden", fails=True)
    assert layer.experts.mca_sequence_ids is None
    assert layer.experts("hidden") is None and layer("hidden") is None
