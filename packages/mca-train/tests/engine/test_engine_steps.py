"""Calls that one step of the engine makes, their order, and the numbers that it divides by."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config import TrainingArguments
from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_train.engine import engine
from mca_train.engine.engine import Engine, _no_loss
from mca_train.losses.token_loss import StepCounts


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **changes)


class Chunk:
    """A wrapped chunk that notes its calls."""

    def __init__(self, notes: list[Any], gradient: float = 0.0) -> None:
        self.notes = notes
        self.gradient = gradient
        self.buffers = [SimpleNamespace(grad_data=torch.full((2,), 5.0))]
        self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.full((3,), 7.0))]

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.notes.append((name, *values))

    def zero_grad_buffer(self) -> None:
        self.notes.append("zero")
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.grad_data.zero_()


@pytest.mark.parametrize(
    ("losses", "layers", "assumed"),
    [(True, 0, [12.0]), (False, 2, [12.0]), (False, 0, []), (False, None, [])],
)
@pytest.mark.parametrize(
    ("micro_batches", "needs", "counts"), [(1, True, False), (2, True, True), (2, False, False)]
)
def test_the_load_of_a_step_is_counted_first_if_it_has_several_micro_batches(
    losses: bool,
    layers: Any,
    assumed: list[float],
    micro_batches: int,
    needs: bool,
    counts: bool,
    monkeypatch,
) -> None:
    notes: list[Any] = []
    found = StepCounts((12.0, 7.0, 5.0), (20.0, 18.0, 16.0), 4)
    step: Any = SimpleNamespace(micro_batches=[object()] * micro_batches)

    def count_step(batch: Any, depths: int, items: Any) -> StepCounts:
        assert (batch, depths, items) == (step, layers or 0, "items")
        return found

    @contextmanager
    def within(name: str) -> Iterator[None]:
        notes.append(f"enter {name}")
        yield
        notes.append(f"leave {name}")

    monkeypatch.setattr(engine, "count_step", count_step)
    monkeypatch.setattr(engine.moe_aux, "has_losses", lambda config: losses)
    for module in (engine.moe_aux, engine.mtp):
        monkeypatch.setattr(module, "begin_step", lambda models, given: notes.append((models, given)))
    monkeypatch.setattr(engine.moe_aux, "count_expert_load", lambda models, forward: notes.append(forward()))
    monkeypatch.setattr(engine, "preserved_rng", lambda: within("rng"))
    made: Any = SimpleNamespace(
        configs=[SimpleNamespace(mtp_num_layers=layers)],
        _num_items="items",
        assumed_counts=[],
        models="models",
        chunks=[Chunk(notes), Chunk(notes)],
        _needs_global_load=needs,
        params_gathered=lambda: within("gathered"),
        run=lambda batch, **options: (batch, options),
    )
    Engine._begin_step(made, step)
    assert made.assumed_counts == assumed
    assert notes[:2] == [("models", found)] * 2
    passed = (step, {"forward_only": True, "loss": _no_loss})
    within_both = [("train",), ("train",), passed]
    expected = ["enter rng", "enter gathered", *within_both, "leave gathered", "leave rng"]
    assert notes[2:] == (expected if counts else [])


def test_a_pass_that_only_counts_has_a_loss_and_a_count_of_zero() -> None:
    batch: Any = SimpleNamespace(loss_mask=torch.ones(2, 3))
    loss, count = _no_loss(torch.ones(2, 3, dtype=torch.bfloat16), batch)
    assert (loss.shape, count.shape, float(loss), float(count)) == ((), (), 0, 0)


@pytest.mark.parametrize(("count", "scale"), [(0.0, 1.0), (4.0, 0.25), (0.25, 4.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_divided_by_the_count_over_all_ranks_after_they_are_reduced(
    count: float, scale: float, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    import megatron.core.distributed as upstream

    notes: list[Any] = []
    monkeypatch.setattr(
        upstream, "finalize_model_grads", lambda chunks, **options: notes.append(("reduce", chunks, options))
    )
    monkeypatch.setattr(engine.groups, "sum_over_data", lambda own: own * 2)
    monkeypatch.setattr(
        engine.moe_aux, "mask_expert_counts", lambda models, kept: notes.append((models, bool(kept)))
    )
    chunks: Any = [Chunk(notes), Chunk(notes)]
    made: Any = SimpleNamespace(
        configs=[SimpleNamespace(moe_router_enable_expert_bias=has_bias)],
        models="models",
        _step_loss=lambda: SimpleNamespace(targets=torch.tensor(count / 2, dtype=torch.float64)),
    )
    Engine._finalize(made, chunks, None, force_all_reduce=True)
    assert float(made._loss_count) == count
    first, *rest = [each for each in notes if each[0] != "scale_gradients"]
    if has_bias:
        assert first == ("models", count != 0)
        (first,) = rest
    assert first == ("reduce", chunks, {"force_all_reduce": True})
    (_, own), (_, other) = notes[-2:]
    assert (float(own), float(other), own.dtype) == (scale, scale, torch.float32)


@pytest.mark.parametrize(
    ("experts", "layers", "begins"), [(None, None, False), (8, None, True), (None, 1, True), (0, 0, False)]
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_of_two_calls_are_added_on_request(
    experts: Any, layers: Any, begins: bool, accumulates: bool
) -> None:
    notes: list[Any] = []
    chunks = [Chunk(notes), Chunk(notes)]

    def run(batch: Any, *, forward_only: bool) -> str:
        assert not forward_only
        notes.append("run")
        for chunk in chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data += 2
        made._loss_count = torch.tensor(3.0)
        return "loss"

    made: Any = SimpleNamespace(
        chunks=chunks,
        configs=[SimpleNamespace(num_moe_experts=experts, mtp_num_layers=layers)],
        _loss_count=torch.tensor(10.0),
        optimizer=SimpleNamespace(zero_grad=lambda: notes.append("zero .grad")),
        require_active_engine=lambda: notes.append("active"),
        _begin_step=lambda batch: notes.append("begin"),
        _grad_buffers=lambda: Engine._grad_buffers(made),
        run=run,
    )
    step: Any = object()
    assert Engine.forward_backward(made, step, accumulate=accumulates) == "loss"
    assert notes == ["active", "zero", "zero", "zero .grad", *(["begin"] if begins else []), "run"]
    dense, experts_gradient = (7, 9) if accumulates else (2, 2)
    for chunk in chunks:
        assert chunk.buffers[0].grad_data.tolist() == [dense] * 2
        assert chunk.expert_parallel_buffers[0].grad_data.tolist() == [experts_gradient] * 3
    assert float(made._loss_count) == (13 if accumulates else 3)
    made._loss_count = None
    Engine.forward_backward(made, step, accumulate=True)
    assert float(made._loss_count) == 3, "the first call of a sum has no earlier one"


def test_a_step_without_targets_updates_nothing() -> None:
    steps: list[Any] = []
    result = (True, torch.tensor(2.5), None)
    made: Any = SimpleNamespace(
        _loss_count=torch.tensor(0.0), optimizer=SimpleNamespace(step=lambda: steps.append(1) or result)
    )
    skipped = Engine.optimizer_step(made)
    assert (skipped.updated, skipped.grad_norm, skipped.had_targets, steps) == (False, None, False, [])
    made._loss_count = None
    done = Engine.optimizer_step(made)
    assert (done.updated, done.grad_norm, done.had_targets, steps) == (True, 2.5, True, [1])
    result = (False, None, None)
    overflowed = Engine.optimizer_step(made)
    assert (overflowed.updated, overflowed.grad_norm, overflowed.had_targets) == (False, None, True)


@pytest.mark.parametrize(
    ("count", "shown"), [(-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan"), (0.25, None)]
)
def test_a_count_below_zero_or_without_bounds_is_an_error(count: float, shown: str | None) -> None:
    steps: list[Any] = []
    made: Any = SimpleNamespace(
        _loss_count=torch.tensor(count),
        optimizer=SimpleNamespace(step=lambda: steps.append(1) or (True, None, None)),
    )
    if shown is None:
        assert Engine.optimizer_step(made).updated and steps == [1]
        return
    with pytest.raises(McaError, match=f"compute_loss returned counts with the sum {shown} over the global"):
        Engine.optimizer_step(made)
    assert not steps


def test_learning_rates_of_a_run_may_change_later_and_nothing_else(tmp_path: Path) -> None:
    first = arguments(tmp_path, learning_rate=1e-3, min_lr=1e-5)
    group = {"max_lr": 1e-3, "min_lr": 1e-5}
    made: Any = SimpleNamespace(
        _fixed_arguments=engine._fixed_arguments(first),
        _trained=[True, False],
        _requires_grad=lambda: [True, False],
        optimizer=SimpleNamespace(param_groups=[group]),
    )
    Engine.update_learning_rates(made, arguments(tmp_path, learning_rate=2e-3, min_lr=1e-6, weight_decay=0.3))
    assert group == {"max_lr": 2e-3, "min_lr": 1e-6}
    for name, value in {
        "max_grad_norm": 0.5,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "adam_epsilon": 1e-3,
        "optimizer": "sgd",
        "overlap_grad_reduce": True,
        "vision_learning_rate": 1e-4,
    }.items():
        with pytest.raises(McaError, match=rf"^(.*, )?{name}[ ,].*changed after the first train\(\)"):
            Engine.update_learning_rates(
                made, arguments(tmp_path, learning_rate=1e-3, min_lr=1e-5, **{name: value})
            )
    made._trained = [True, True]
    with pytest.raises(McaError, match="requires_grad of parameters changed"):
        Engine.update_learning_rates(made, first)


def test_rates_stay_if_a_part_has_its_own(tmp_path: Path) -> None:
    rates = {"projector_learning_rate": 1e-4, "min_lr": 0.0}
    group = {"max_lr": 3.0, "min_lr": 2.0}
    made: Any = SimpleNamespace(
        _fixed_arguments=engine._fixed_arguments(arguments(tmp_path, learning_rate=1e-3, **rates)),
        _trained=[],
        _requires_grad=list,
        optimizer=SimpleNamespace(param_groups=[group]),
    )
    Engine.update_learning_rates(made, arguments(tmp_path, learning_rate=1e-3, **rates))
    assert group == {"max_lr": 3.0, "min_lr": 2.0}
    with pytest.raises(McaError, match=r"^learning_rate changed"):
        Engine.update_learning_rates(made, arguments(tmp_path, learning_rate=2e-3, **rates))


@pytest.mark.parametrize("overlaps_reduce", [False, True])
@pytest.mark.parametrize("overlaps_gather", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_the_schedule_overlaps_what_the_arguments_ask_for(
    overlaps_reduce: bool, overlaps_gather: bool, number: int
) -> None:
    notes: list[Any] = []
    chunks = [Chunk(notes) for _ in range(number)]
    configs = [SimpleNamespace(), SimpleNamespace()]
    made: Any = SimpleNamespace(
        _args=SimpleNamespace(overlap_grad_reduce=overlaps_reduce, overlap_param_gather=overlaps_gather),
        optimizer=SimpleNamespace(scale_loss="scale"),
        _finalize="finalize",
        configs=configs,
        chunks=chunks,
    )
    made._per_chunk = lambda method: Engine._per_chunk(made, method)
    Engine._set_schedule_callbacks(made)
    names = {"grad_scale_func", "finalize_model_grads_func"}
    names |= {"no_sync_func", "grad_sync_func"} if overlaps_reduce else set()
    names |= {"param_sync_func"} if overlaps_gather else set()
    for config in configs:
        calls = vars(config)
        assert calls.keys() == names
        assert (calls["grad_scale_func"], calls["finalize_model_grads_func"]) == ("scale", "finalize")
        for name in sorted(names - {"grad_scale_func", "finalize_model_grads_func"}):
            notes.clear()
            found = calls[name]
            assert isinstance(found, list) == (number > 1)
            for call in found if number > 1 else [found]:
                call()
            method = {"no_sync_func": "no_sync", "grad_sync_func": "start_grad_sync"}.get(name)
            assert notes == [(method or "start_param_sync",)] * number


@pytest.mark.parametrize(
    ("distributed", "dtype", "overlaps", "gathers"),
    [
        (True, torch.float32, False, True),
        (False, torch.float32, False, False),
        (True, torch.bfloat16, False, False),
        (True, torch.float32, True, False),
    ],
)
def test_only_fp32_shards_are_gathered_at_once(
    distributed: bool, dtype: torch.dtype, overlaps: bool, gathers: bool
) -> None:
    notes: list[Any] = []
    args = SimpleNamespace(use_distributed_optimizer=distributed, overlap_param_gather=overlaps)
    made: Any = SimpleNamespace(_args=args, params_dtype=dtype, chunks=[Chunk(notes), Chunk(notes)])
    Engine.sync_params(made)
    assert notes == ([("start_param_sync",)] * 2 if gathers else [])


def test_an_engine_whose_model_another_has_wrapped_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = SimpleNamespace(models=["a", "b"], chunks=["wrapped a", "wrapped b"])
    monkeypatch.setattr(engine, "ddp_wrapper", lambda model: made.chunks["ab".index(model)])
    Engine.require_active_engine(made)
    monkeypatch.setattr(engine, "ddp_wrapper", lambda model: "wrapped a")
    with pytest.raises(McaError, match="another trainer has trained this model since"):
        Engine.require_active_engine(made)


@pytest.mark.parametrize("name", ["sgd", None])
def test_an_engine_takes_its_settings_and_trains_at_once(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[Any] = []
    model: Any = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(params_dtype=torch.bfloat16)

    def begin(self: Any, chunks: Any, loss: Any, *, wants_logits: bool) -> None:
        assert (chunks, loss, wants_logits) == ([model], "loss", True)
        self.configs, self.models, self.chunks = [model.config], [model], [model]

    monkeypatch.setattr(engine.Pipeline, "__init__", begin)
    monkeypatch.setattr(engine.moe_aux, "needs_global_load", lambda config: config is model.config)
    monkeypatch.setattr(Engine, "_wrap", lambda self, chunks: [torch.nn.Sequential(*chunks).eval()])
    monkeypatch.setattr(Engine, "_set_schedule_callbacks", lambda self: notes.append("callbacks"))
    monkeypatch.setattr(
        engine, "build_optimizer", lambda chunks, args, dtype: notes.append((chunks, dtype)) or "optimizer"
    )
    args = arguments(tmp_path, optimizer=name)
    with warnings.catch_warnings():
        made = Engine([model], args, "loss", wants_logits=True, num_items="items")  # type: ignore[arg-type]
    assert notes == [(made.chunks, torch.bfloat16), "callbacks"]
    assert made.chunks[0].training and made.optimizer == "optimizer"
    assert made.optimizer_name == (name or "adam")
    assert made._needs_global_load and made._num_items == "items" and made._loss_count is None
    assert made._trained == [True, True] and made.assumed_counts == []
    assert made._fixed_arguments == engine._fixed_arguments(args)


def test_weights_that_changed_go_to_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    reloaded: list[Any] = []
    monkeypatch.setattr(engine, "reload_main_params", reloaded.append)
    Engine.reload_main_params(SimpleNamespace(optimizer="optimizer"))  # type: ignore[arg-type]
    assert reloaded == ["optimizer"]
