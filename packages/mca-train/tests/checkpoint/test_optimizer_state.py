"""Optimizer states whose parts a checkpoint holds only in part."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.checkpoint import distributed_optimizer, optimizer_state
from mca_train.checkpoint.writer import raise_save_errors
from mca_train.engine import offload


def test_a_leaf_that_is_stored_as_several_tensors_needs_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "optimizer.state.exp_avg.in_proj.weight"
    leaf = SimpleNamespace(key=key)
    for name, value in {
        "shapes_in": lambda folder: {f"{key}.query": (2, 2)},
        "_sharded": lambda *args, **options: {},
        "_require_same_kind": lambda *args: None,
        "_use_saved_keys": lambda *args: None,
        "_leaves": lambda state: [({}, "weight", leaf)],
        "_keys": lambda leaf: {f"{key}.query", f"{key}.key"},
        "_counts_steps": lambda part: True,
        "all_gather": lambda value: [value],
    }.items():
        monkeypatch.setattr(optimizer_state, name, value)
    optimizer: Any = None
    read_weight: Any = None
    numbers = optimizer_state.Numbers(1.0, None, "adam")
    with pytest.raises(McaError, match=r"holds no 'exp_avg\.in_proj\.weight' \(weight\)"):
        optimizer_state._load(optimizer, [], tmp_path, numbers, read_weight)


def test_the_step_is_the_largest_of_all_parts() -> None:
    """A part whose parameters are not trained yet has counted fewer steps."""
    parts: Any = {
        0: {"optimizer": {"param_groups": [{"step": 3}, {"step": 5}]}},
        1: {"param_groups": [{"step": 4}]},
    }
    assert optimizer_state._numbers(parts).step == 5.0
    assert optimizer_state._numbers({"optimizer": {"state": {"common_step": 7}}}).step == 7.0
    assert optimizer_state._numbers({}).step is None


@pytest.mark.parametrize(("offset", "kept"), [(0, 4), (4, 2), (8, 0)])
def test_padded_rows_that_a_checkpoint_lacks_are_zero_on_each_rank(offset: int, kept: int) -> None:
    leaf: Any = SimpleNamespace(allow_shape_mismatch=True, prepend_axis_num=1, global_offset=(0, offset))
    found: Any = optimizer_state._without_padding(torch.ones(4, 2), leaf, (3, 6))
    assert found.any(1).tolist() == [True] * kept + [False] * (4 - kept)


def test_chained_optimizers_have_the_keys_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout with expert parallelism has two optimizers, and must read the state of a layout with one."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    monkeypatch.setattr(optimizer_state.groups, "data_group_with_context", lambda: None)
    keys = ["optimizer.state.exp_avg.dense", "optimizer.state.exp_avg.experts"]
    singles = [
        SimpleNamespace(
            init_state_fn=print,
            optimizer=SimpleNamespace(state={0: {}}),
            sharded_state_dict=lambda *_, key=key, **__: {
                0: ShardedTensor.from_rank_offsets(key, torch.zeros(2))
            },
        )
        for key in keys
    ]
    chained: Any = ChainedOptimizer([])
    chained.chained_optimizers, chained._synchronize_steps = singles, lambda: None
    state = optimizer_state._sharded(chained, [], loading=False)
    assert [leaf.key for _, _, leaf in optimizer_state._leaves(state)] == keys


@pytest.mark.parametrize(
    ("held", "requested"),
    [
        ((), {"exp_avg", "exp_avg_sq", "param"}),
        (("param",), {"exp_avg", "exp_avg_sq", "param"}),
        (("momentum_buffer", "param"), {"momentum_buffer", "param"}),
        (("exp_avg", "exp_avg_sq"), {"exp_avg", "exp_avg_sq", "param"}),
    ],
)
def test_a_shard_without_state_yet_requests_that_of_adam(
    held: tuple[str, ...], requested: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_optimizer, "_local_shards", lambda *_: dict.fromkeys(held))
    found = distributed_optimizer._empty_full(None, torch.nn.Parameter(torch.zeros(2, 3)))  # type: ignore[arg-type]
    assert found.keys() == requested and all(each.shape == (2, 3) for each in found.values())


@pytest.mark.parametrize(
    ("groups", "states", "step"),
    [
        ([], [], 0),
        ([{}], [{"exp_avg": 0}], 0),
        ([{}, {"step": 2}], [{}], 2),
        ([{"step": 2}], [{"step": torch.tensor(3.0)}], 3),
    ],
)
def test_the_step_of_optimizers_is_kept_by_group_or_by_parameter(
    groups: list[dict[str, int]], states: list[dict[str, Any]], step: int
) -> None:
    single: Any = SimpleNamespace(param_groups=groups, state=dict(enumerate(states)))
    assert offload._step([single]) == step


@pytest.mark.parametrize("result", [None, (0, [1]), (0, OSError("full"))])
def test_the_error_of_a_process_that_saves_is_raised(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(lambda: result))
    with raise_save_errors():
        if result is not None and isinstance(result[1], OSError):
            with pytest.raises(OSError, match="full"):
                FileSystemWriterAsync.write_preloaded_data()
        else:
            assert FileSystemWriterAsync.write_preloaded_data() == result
    assert FileSystemWriterAsync.write_preloaded_data() == result


def test_a_hybrid_optimizer_is_an_adam_while_its_state_is_saved_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    @contextmanager
    def as_adam(optimizer: str, *, loading: bool) -> Iterator[None]:
        calls.append((optimizer, loading))
        yield
        calls.append("plain again")

    monkeypatch.setattr(optimizer_state, "as_adam", as_adam)
    monkeypatch.setattr(optimizer_state, "_load", lambda *values: calls.append(values))
    read_weight: Any = "read"
    optimizer_state.load("own", [], tmp_path, "numbers", read_weight)  # type: ignore[arg-type]
    assert calls == [("own", True), ("own", [], tmp_path, "numbers", "read"), "plain again"]
    calls.clear()
    monkeypatch.setattr(
        optimizer_state, "_sharded", lambda optimizer, chunks, *, loading: calls.append(loading) or "state"
    )
    monkeypatch.setattr(optimizer_state, "_leaves", lambda state: [(None, "a", "leaf"), (None, "b", "other")])
    monkeypatch.setattr(optimizer_state, "_numbers", lambda state: 3)
    monkeypatch.setattr(optimizer_state, "_max_step", lambda numbers: numbers + 1)
    monkeypatch.setattr(
        optimizer_state, "write_state", lambda leaves, folder, *, background: (leaves, folder, background)
    )
    found = optimizer_state.save("own", [], tmp_path, background=True)  # type: ignore[arg-type]
    assert found == (4, ({"0": "leaf", "1": "other"}, tmp_path, True))  # type: ignore[comparison-overlap]
    assert calls == [("own", False), False, "plain again"]


@pytest.mark.parametrize("step", [None, 7.0])
def test_numbers_go_to_the_parts_that_count_steps(step: float | None) -> None:
    scaler = {"scale": torch.zeros(1), "growth_tracker": torch.zeros(1, dtype=torch.int32), "hysteresis": 1}
    state: Any = {
        0: {"optimizer": {"param_groups": [{"step": 1}, {"step": 2}], "state": {}}, "grad_scaler": scaler},
        1: {"param_groups": [{"step": 3}], "state": {"common_step": torch.tensor(3.0)}},
        2: {"param_groups": [{"step": 4}], "state": {"common_step": torch.tensor(4.0)}},
    }
    saved = {"scale": 64.0, "growth_tracker": 5, "hysteresis": 2}
    optimizer_state._put_numbers(state, optimizer_state.Numbers(step, saved), [True, True, False])
    steps = [
        group.get("step")
        for part in optimizer_state._parts(state)
        for group in optimizer_state._param_groups(part)
    ]
    assert steps == ([7, 7, 7, 4] if step else [None, None, None, 4])
    common = [float(state[number]["state"]["common_step"]) for number in (1, 2)]
    assert common == ([7, 4] if step else [3, 4])
    found = state[0]["grad_scaler"]
    assert (found["scale"].tolist(), found["growth_tracker"].tolist(), found["hysteresis"]) == (
        [64.0],
        [5],
        2,
    )
    assert found["growth_tracker"].dtype == torch.int32
    assert "grad_scaler" not in state[1]


@pytest.mark.parametrize(
    ("tracker", "hysteresis", "kept"), [(3, 1, (3, 1)), (9, 2, (9, 2)), (10, 3, (9, 2)), (99, 0, (9, 0))]
)
@pytest.mark.parametrize("chained", [False, True])
def test_counts_of_a_loss_scaler_stay_within_the_settings_of_the_run(
    tracker: int, hysteresis: int, kept: tuple[int, int], chained: bool
) -> None:
    dynamic = SimpleNamespace(grad_scaler=SimpleNamespace(growth_interval=10, hysteresis=2))
    optimizer: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(), dynamic]) if chained else dynamic
    saved = {"scale": 2.0, "growth_tracker": tracker, "hysteresis_tracker": hysteresis}
    found: Any = optimizer_state._clamp_scaler(saved, optimizer)
    assert (found["growth_tracker"], found["hysteresis_tracker"], found["scale"]) == (*kept, 2.0)
    assert optimizer_state._clamp_scaler(None, optimizer) is None
    constant: Any = SimpleNamespace(grad_scaler=SimpleNamespace(scale=1.0))
    assert optimizer_state._clamp_scaler(saved, constant) is saved
