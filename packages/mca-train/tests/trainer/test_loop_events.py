"""Decisions of the training loop after a step, on resume and at the end, by the calls that they lead to."""

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.checkpoint.training_state import PendingEvents
from mca_train.trainer import loop as module
from mca_train.trainer.evaluator import EvaluationStopped, Evaluator
from mca_train.trainer.loop import Loop


def control(*names: str) -> Any:
    every = ("log", "evaluate", "save", "training_stop", "epoch_stop")
    return SimpleNamespace(**{f"should_{name}": name in names for name in every})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of a loop at step 5, whose parts add their names to ``events``."""
    events: list[Any] = []

    def add(*words: Any, result: Any = None) -> Any:
        return lambda *more: events.append(words[0] if len(words) == 1 else words) or result

    @contextmanager
    def gathered() -> Any:
        events.append("gather")
        yield

    hf = SimpleNamespace(
        state=SimpleNamespace(global_step=5, max_steps=9, log_history=[1, 2], best_model_checkpoint="best"),
        control=control(),
        args=SimpleNamespace(save_strategy="steps", logging_strategy="steps", load_best_model_at_end=False),
        callback_handler=SimpleNamespace(callbacks=[]),
        fire=lambda name: events.append(name),
        log=lambda metrics: events.append(("metrics", sorted(metrics))),
        _evaluate=add("evaluate"),
        _determine_best_metric=lambda **_: True,
        _save_checkpoint=lambda *_: events.append("save"),
    )
    evaluator = object.__new__(Evaluator)
    evaluator._stops_on_signal = False
    each: Any = SimpleNamespace(
        events=events,
        _hf=hf,
        _watch=SimpleNamespace(stopped=False, hang_detector=SimpleNamespace(enter=lambda *_: None)),
        _logger=SimpleNamespace(
            log_step=add("log"),
            require_updates=add("require updates"),
            require_trained=add("require trained"),
            add_up=add("add up"),
            meter=SimpleNamespace(pause=nullcontext, flush=lambda: None),
        ),
        _saver=SimpleNamespace(
            checkpoints=SimpleNamespace(finishing_on_error=nullcontext, finish=add("finish saves")),
        ),
        _evaluator=evaluator,
        _model="model",
        _progress=SimpleNamespace(
            started_at_step=0,
            samples=10,
            totals=SimpleNamespace(logged=4, steps=3, mean_loss=1.5),
            pending=PendingEvents(end_of_epoch=True),
        ),
        _runner=SimpleNamespace(
            training=SimpleNamespace(engine=SimpleNamespace(params_gathered=gathered)),
            load_weights=lambda path: events.append(("load", path)),
        ),
    )
    for name in ("_log_evaluate_save", "_evaluate_or_put_off", "_end_epoch"):
        setattr(each, name, lambda name=name: getattr(Loop, name)(each))
    monkeypatch.setattr(module, "name_missing_metric", lambda args: nullcontext())
    monkeypatch.setattr(module, "speed_metrics", lambda *_, **__: {"train_runtime": 1.0})
    monkeypatch.setattr(module, "is_early_stopped", lambda callbacks: False)
    return each


@pytest.mark.parametrize(
    ("asked", "logged", "started", "events"),
    [
        ((), 4, 0, []),
        (("log",), 4, 0, ["log"]),
        (("log",), 5, 0, []),
        (("log", "evaluate", "save"), 4, 0, ["log", "evaluate", "save"]),
        (("training_stop", "save"), 4, 0, ["require updates", "save"]),
        (("training_stop",), 4, 5, []),
        (("training_stop",), 4, 4, ["require updates"]),
    ],
)
def test_a_step_is_logged_checked_evaluated_and_saved(
    asked: tuple[str, ...], logged: int, started: int, events: list[str], made: Any
) -> None:
    made._hf.control = control(*asked)
    made._progress.totals.logged, made._progress.started_at_step = logged, started
    Loop._log_evaluate_save(made)
    assert made.events == events
    assert not made._hf.control.should_save


def test_a_stopped_run_is_not_checked(made: Any) -> None:
    made._hf.control, made._watch.stopped = control("training_stop"), True
    Loop._log_evaluate_save(made)
    assert made.events == []


@pytest.mark.parametrize(
    ("strategy", "best", "saves"), [("best", True, True), ("best", False, False), ("steps", True, False)]
)
def test_the_best_step_is_saved_if_the_best_is_asked_for(
    strategy: str, best: bool, saves: bool, made: Any
) -> None:
    made._hf.control, made._hf.args.save_strategy = control("evaluate"), strategy
    made._hf._determine_best_metric = lambda **_: best
    Loop._log_evaluate_save(made)
    assert made.events == ["evaluate", *(["save"] if saves else [])]
    assert not made._evaluator._stops_on_signal


@pytest.mark.parametrize("save", [False, True])
def test_an_evaluation_that_a_signal_ends_is_put_off(save: bool, made: Any) -> None:
    def stop(*_: Any) -> None:
        assert made._evaluator._stops_on_signal
        made._hf.state.log_history.append("half")
        raise EvaluationStopped

    made._hf._evaluate = stop
    made._hf.control = control("evaluate", *(["save"] if save else []))
    Loop._evaluate_or_put_off(made)
    flags = made._hf.control
    assert (flags.should_save, flags.should_training_stop, flags.should_evaluate) == (True, True, False)
    assert made._progress.pending == PendingEvents(evaluation=True, save=save, end_of_epoch=True)
    assert made._hf.state.log_history == [1, 2] and not made._evaluator._stops_on_signal


@pytest.mark.parametrize(
    ("due", "over", "early", "stopped", "events"),
    [
        (PendingEvents(), True, False, False, []),
        (PendingEvents(evaluation=True, save=True), False, False, False, ["evaluate", "save"]),
        (PendingEvents(end_of_epoch=True), False, False, False, []),
        (PendingEvents(end_of_epoch=True), True, False, False, ["on_epoch_end"]),
        (PendingEvents(end_of_epoch=True), False, True, False, ["on_epoch_end", "require updates"]),
        (PendingEvents(end_of_epoch=True), True, True, True, []),
    ],
)
def test_a_resumed_run_makes_up_for_what_was_put_off(
    due: PendingEvents,
    over: bool,
    early: bool,
    stopped: bool,
    events: list[str],
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "is_early_stopped", lambda callbacks: early)
    made._hf.control, made._watch.stopped = control("log"), stopped
    Loop._catch_up(made, due, over=over)
    assert made.events == events
    assert made._hf.control.should_training_stop is early
    if "on_epoch_end" in events:
        assert made._progress.pending == PendingEvents()
    else:
        assert made._progress.pending.end_of_epoch is due.end_of_epoch


@pytest.mark.parametrize(
    ("changes", "events"),
    [
        ({}, ["log", "require trained"]),
        ({"logged": 5}, ["add up", "require trained"]),
        ({"stopped": True}, ["add up"]),
        ({"strategy": "epoch"}, ["add up", "require trained"]),
        ({"first": 5}, ["add up"]),
        ({"best": True}, ["log", "require trained", ("load", Path("best"))]),
        ({"best": True, "stopped": True}, ["add up"]),
    ],
)
def test_a_run_ends_with_its_last_sums_and_the_best_model(
    changes: dict[str, Any], events: list[Any], made: Any
) -> None:
    made._progress.totals.logged = changes.get("logged", 4)
    made._watch.stopped = changes.get("stopped", False)
    made._hf.args.logging_strategy = changes.get("strategy", "steps")
    made._hf.args.load_best_model_at_end = changes.get("best", False)
    output = Loop._finish(made, changes.get("first", 0), 0.0)
    logged = [("metrics", ["train_loss", "train_runtime"])]
    loaded = [each for each in events if each[0] == "load"]
    before = [each for each in events if each not in loaded]
    assert made.events == ["gather", "finish saves", *before, *logged, *loaded, "on_train_end"]
    assert (output.global_step, output.training_loss) == (5, 1.5)


def test_a_run_without_steps_has_no_loss(made: Any) -> None:
    made._progress.totals.steps, made._hf.state.best_model_checkpoint = 0, None
    made._hf.args.load_best_model_at_end = True
    assert Loop._finish(made, 0, 0.0).training_loss == 0
    assert made.events[-2:] == [("metrics", ["train_runtime"]), "on_train_end"]
