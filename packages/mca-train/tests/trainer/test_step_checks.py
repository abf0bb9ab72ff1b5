"""Checks after each step: what counts as skipped, what ends a run, and the words about it."""

from collections import deque
from contextlib import nullcontext
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.engine import finite
from mca_train.engine.engine import Engine
from mca_train.engine.finite import require_finite, require_finite_weights
from mca_train.trainer import logger as logging
from mca_train.trainer import monitor
from mca_train.trainer.logger import Logger
from mca_train.trainer.monitor import Watch

RESUME = "Resume from the last checkpoint with a lower learning_rate"


def gradient(*values: float, main: bool = False) -> Any:
    tensor = torch.zeros(len(values))
    setattr(tensor, "main_grad" if main else "grad", torch.tensor(values))
    return tensor


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold the same names, of which the second also has one more."""
    monkeypatch.setattr(finite, "all_gather", lambda local: [local, [*local, ("f", "nan")] if local else []])


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (nan, 1.0, "the loss is nan"),
        (inf, None, "the loss is inf"),
        (None, inf, "the gradient norm is inf"),
        (1.0, nan, "the gradient norm is nan"),
        (nan, nan, "the loss is nan"),
    ],
)
def test_the_first_gradients_that_are_not_finite_are_named(
    loss: float | None, norm: float | None, what: str, ranks: None
) -> None:
    named = {
        "a": gradient(1.0, 2.0),
        "b": gradient(inf, nan),
        "c": gradient(inf, 0.0, main=True),
        "d": torch.full((1,), nan),
        "e": gradient(0.0, -inf),
    }
    with pytest.raises(McaError) as error:
        require_finite(loss, norm, 7, named.items())
    assert str(error.value) == (
        f"step 7: {what}; gradients that are not finite: b (rank 0: nan), c (rank 0: inf), e (rank 0: inf) and 1 "
        f"more. {RESUME}, or inspect the samples of this step"
    )
    with pytest.raises(McaError, match=rf"^step 7: {what}\. Resume"):
        require_finite(loss, norm, 7, [("a", named["a"]), ("d", named["d"])])


def test_finite_numbers_and_missing_ones_are_no_error(ranks: None) -> None:
    for pair in ((1.0, 2.0), (None, 2.0), (1.0, None), (None, None)):
        require_finite(*pair, 1, [("b", gradient(nan))])
    require_finite_weights(1, [("a", torch.zeros(2))])
    with pytest.raises(
        McaError, match=r"step 3: .* not saved: a \(rank 0: inf\), f \(rank 1: nan\)\. Resume"
    ):
        require_finite_weights(3, [("a", torch.tensor([0.0, inf]))])


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch whose model counts how often each check looks at it."""
    for name in ("Throughput", "Stragglers"):
        monkeypatch.setattr(monitor, name, lambda *_: SimpleNamespace(report=lambda *_: {}))
    seen: list[Any] = []
    monkeypatch.setattr(monitor, "require_finite_weights", lambda step, _: seen.append(("weights", step)))
    monkeypatch.setattr(
        monitor, "require_finite", lambda loss, norm, step, _: seen.append((loss, norm, step))
    )
    monkeypatch.setattr(monitor.groups, "sum_over_data", lambda tensor: tensor)
    args = SimpleNamespace(hysteresis=None, loss_scale=None)
    model = SimpleNamespace(trained_parameters=dict, config=SimpleNamespace(dtype="float16"))
    made: Any = Watch(args, model, object())  # type: ignore[arg-type]
    made.seen, made.args, made.model = seen, args, model
    return made


def step(had_targets: bool = True, updated: bool = True, norm: float | None = 2.0) -> Any:
    return SimpleNamespace(had_targets=had_targets, updated=updated, grad_norm=norm)


def scaled(scale: float) -> Any:
    return SimpleNamespace(get_loss_scale=lambda: scale)


def test_steps_without_targets_and_overflowed_ones_are_skipped(watch: Any, caplog: Any) -> None:
    loss: Any = SimpleNamespace(loss_sum=torch.tensor(1.0))
    report: Any = SimpleNamespace(speed=dict, num_steps=1, mean=3.0)
    watch.after_step(step(), loss, scaled(8), 1)
    assert watch.seen == [(None, 2.0, 1)]
    for number in (2, 3):
        watch.after_step(step(had_targets=False, updated=False), loss, scaled(8), number)
    assert sum("0 targets" in each.getMessage() for each in caplog.records) == 1, "logged once"
    watch.after_step(step(updated=False), loss, scaled(4), 4)
    assert watch.seen[1:] == [("weights", 4)]
    assert "step 4 was skipped: gradients overflowed; the loss scale is 4 now" in caplog.text
    assert watch.state() == {"skipped": 3}
    assert watch.logs(report, scaled(4), 5) == {"loss_scale": 4, "skipped_steps": 3}
    assert watch.logs(report, scaled(4), 6) == {"loss_scale": 4, "skipped_steps": 0}
    watch.model.config.dtype = "bfloat16"
    assert watch.logs(report, scaled(1), 7) == {}
    assert watch.seen[-1] == (3.0, None, 7)
    watch.restore({"skipped": 5})
    assert watch.logs(report, scaled(1), 8) == {"skipped_steps": 5}


@pytest.mark.parametrize("hysteresis", [None, 5])
@pytest.mark.parametrize("number", [1.0, nan])
def test_a_run_ends_after_steps_in_a_row_that_no_scale_helps(
    number: float, hysteresis: int | None, watch: Any
) -> None:
    watch.args.hysteresis = hysteresis
    loss: Any = SimpleNamespace(loss_sum=torch.tensor(number))
    most = monitor._TOLERATED + (hysteresis or 2)
    watch.after_step(step(updated=False), loss, scaled(1), 1)  # the first one lowers the scale
    for _ in range(2):
        for _ in range(most - 1 - (number != number)):
            watch.after_step(step(updated=False), loss, scaled(1), 2)
        watch.after_step(step(), loss, scaled(1), 3)  # an update starts the count again
        watch.after_step(step(updated=False), loss, scaled(0.5), 4)
    for _ in range(most - 1 - (number != number)):
        watch.after_step(step(updated=False), loss, scaled(0.5), 5)
    why = "goes no lower" if number == 1 else "does not help: the loss itself is nan"
    with pytest.raises(McaError, match=rf"step 6: {most} steps in a row .* scale, 0\.5, {why}; .* in bf16"):
        watch.after_step(step(updated=False), loss, scaled(0.5), 6)


@pytest.mark.parametrize(
    ("steps", "empty", "updates", "tokens", "message"),
    [
        (4, 4, 0, True, "all 4 steps of the run were skipped, no token"),
        (4, 4, 0, False, None),
        (4, 3, 0, True, "all 4 steps of the run were skipped, their gradients overflowed"),
        (4, 3, 1, True, None),
        (4, 0, 0, False, "their gradients overflowed"),
        (0, 0, 0, True, None),
    ],
)
def test_a_run_that_updates_nothing_fails(
    steps: int, empty: int, updates: int, tokens: bool, message: str | None, watch: Any
) -> None:
    totals: Any = SimpleNamespace(without_targets=empty, updates=updates)
    if message is None:
        watch.require_updates(totals, steps, over_tokens=tokens)
        return
    with pytest.raises(McaError, match=message):
        watch.require_updates(totals, steps, over_tokens=tokens)
    watch.args.loss_scale = 64.0
    if "overflowed" in message:
        with pytest.raises(McaError, match="loss_scale is 64: lower it, or remove it"):
            watch.require_updates(totals, steps, over_tokens=tokens)


@pytest.mark.parametrize("save,evaluate", [(True, False), (False, True)])
def test_a_signal_saves_ends_and_leaves_the_evaluation_pending(
    watch: Any, save: bool, evaluate: bool
) -> None:
    control: Any = SimpleNamespace(should_save=save, should_evaluate=evaluate, should_training_stop=False)
    watch.signal = SimpleNamespace(agreed=lambda: False)
    due = watch.stop_on_signal(control, 3)
    assert (due.evaluation, due.save, due.end_of_epoch) == (False, False, True)
    assert (control.should_save, control.should_evaluate) == (save, evaluate)
    assert not control.should_training_stop
    watch.signal = SimpleNamespace(agreed=lambda: True)
    due = watch.stop_on_signal(control, 3)
    assert (due.evaluation, due.save, due.end_of_epoch) == (evaluate, save, True)
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (True, False, True)


@pytest.mark.parametrize(
    ("logged", "started", "now", "when"),
    [
        (4, 0, 5, "step 5"),
        (4, 0, 7, "steps 5 to 7"),
        (2, 4, 7, "steps 5 to 7"),
        (5, 4, 5, None),
        (0, 5, 5, None),
    ],
)
def test_sums_since_the_last_log_are_added_to_the_run(
    logged: int, started: int, now: int, when: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(logging, "require_same_samples", lambda *words: compared.append(words[-1]))
    totals = SimpleNamespace(logged=logged, loss=10.0, steps=3)
    made: Any = SimpleNamespace(
        _progress=SimpleNamespace(totals=totals, started_at_step=started, samples=20),
        _hf=SimpleNamespace(
            state=SimpleNamespace(global_step=now, num_input_tokens_seen=100), ranks=SimpleNamespace()
        ),
        _checkpoints=SimpleNamespace(finishing_on_error=nullcontext),
    )
    made._require_counts = lambda *words: Logger._require_counts(made, *words)
    engine: Any = SimpleNamespace(assumed_counts=deque())
    report: Any = SimpleNamespace(
        losses=[1.0, 2.5], targets=[1.0, 2.0], checksum=0, num_tokens=7, num_samples=4
    )
    Logger.add_up(made, report, engine)
    assert compared == ([when] if when else [])
    assert (totals.loss, totals.steps, totals.logged) == (13.5, 5, now)
    assert (made._hf.state.num_input_tokens_seen, made._progress.samples) == (107, 24)


@pytest.mark.parametrize(
    ("counts", "assumed", "wrong"),
    [
        ([4.0, 8.0], [4.0, 8.0], None),
        ([4.0, 8.0], [3.0, 8.0], "step 8: object.compute_loss returned the count 4, num_items 3,"),
        ([3.0, 8.0], [4.0, 8.0], "step 8: "),
        ([4.0, 8.0], [4.0, 7.0], "step 9: "),
        ([2.0, 4.0, 8.0], [4.0, 8.0], None),  # the first step came before the run was resumed
    ],
)
def test_counts_that_differ_from_the_predicted_ones_name_their_step(
    counts: list[float], assumed: list[float], wrong: str | None
) -> None:
    made: Any = SimpleNamespace(_hf=object())
    engine: Any = SimpleNamespace(assumed_counts=assumed)
    if wrong is None:
        Logger._require_counts(made, counts, 9, engine)
    else:
        with pytest.raises(McaError, match=wrong):
            Logger._require_counts(made, counts, 9, engine)
    assert engine.assumed_counts == []


@pytest.mark.parametrize("count", [-3.0, nan, inf])
def test_a_loss_count_that_gradients_cannot_be_divided_by_is_an_error(count: float) -> None:
    optimizer = SimpleNamespace(step=lambda: (True, 2.0, None))
    engine: Any = SimpleNamespace(_loss_count=torch.tensor(0.5), optimizer=optimizer)
    assert Engine.optimizer_step(engine).grad_norm == 2
    engine._loss_count = torch.tensor(count)
    with pytest.raises(
        McaError, match=f"counts with the sum {count:g} over the global batch; expected 0 or more"
    ):
        Engine.optimizer_step(engine)
