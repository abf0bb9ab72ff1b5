"""The layout that is saved with random states."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_train.engine.rng import _sizes, has_dropout

AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def test_each_size_that_decides_which_ranks_draw_alike_is_saved():
    plain: Any = SimpleNamespace(layout=ParallelLayout(expert_tensor_parallel_size=1), world_size=8)
    assert _sizes(plain) == {"ranks": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}
    for option, axis in AXES.items():
        sizes = {"expert_tensor_parallel_size": 1} | {option: 2}
        ranks: Any = SimpleNamespace(layout=ParallelLayout(**sizes), world_size=8)
        assert _sizes(ranks) == _sizes(plain) | {axis: 2}


@pytest.mark.parametrize("drops", [True, False])
def test_other_random_states_are_reported_only_with_dropout(drops, tmp_path, monkeypatch, caplog):
    from mca_train.batching.position import RunPosition
    from mca_train.checkpoint import training_state

    monkeypatch.setattr(training_state, "run_on_all_ranks_unwrapped", lambda work: [work()])
    monkeypatch.setattr(training_state, "matches_layout", lambda folder, ranks: False)
    nothing: Any = None
    state = training_state.TrainingState(nothing, nothing, nothing, RunPosition())
    state.load_rng(tmp_path, drops=drops)
    assert ("dropout continues with other random numbers" in caplog.text) == drops
    rates = {"hidden_dropout": 0.1 * drops, "attention_dropout": 0.0, "moe_input_jitter_eps": None}
    model: Any = SimpleNamespace(megatron=SimpleNamespace(**rates), config=SimpleNamespace(moe=None))
    assert has_dropout(model) == drops


@pytest.mark.parametrize(
    ("rates", "moe", "adapter", "draws"),
    [
        ({}, None, None, False),
        ({"hidden_dropout": 0.1}, None, None, True),
        ({"attention_dropout": 0.1}, None, None, True),
        ({"moe_input_jitter_eps": 0.1}, None, None, True),
        ({}, {}, None, False),
        ({}, {"sparse_mixer_jitter": 0.0}, None, True),
        ({}, {"input_jitter_noise": 0.1}, None, True),
        ({}, None, 0.0, False),
        ({}, None, 0.1, True),
        ({}, {}, 0.1, True),
    ],
)
def test_dropout_and_noise_draw_random_numbers(rates, moe, adapter, draws):
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None}
    jitter = {"sparse_mixer_jitter": None, "input_jitter_noise": 0.0}
    model: Any = SimpleNamespace(
        megatron=SimpleNamespace(**(plain | rates)),
        config=SimpleNamespace(moe=None if moe is None else SimpleNamespace(**(jitter | moe))),
        **({} if adapter is None else {"adapter": SimpleNamespace(dropout=adapter)}),
    )
    assert has_dropout(model) is draws
