"""When ranks that exchange in the background stop: two of them, of which this one hears nothing but itself."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.trainer import evaluation, stop_signal
from mca_train.trainer.dpo import DpoTrainer
from mca_train.trainer.evaluation import EvaluationMixin
from mca_train.trainer.stop_signal import StopSignal

SHORT, LONG = 0.02, 5.0  # seconds


class Clock:
    """Seconds that pass as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(stop_signal, "time", clock)
    monkeypatch.setattr(stop_signal, "_new_group", lambda ranks: ranks)
    monkeypatch.setattr(stop_signal.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(stop_signal.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(stop_signal.dist, "all_reduce", lambda *args, **options: work)
    return clock


def with_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "axis_groups", lambda rank, size: [[0, 1], [0, 2]])


def steps_until_agreed(signal: StopSignal, clock: Clock, seconds: float) -> int:
    """Steps of so many seconds that go by after SIGTERM."""
    signal._handle(15, None)
    for step in range(1, 200):
        clock.now += seconds
        if signal.agreed():
            return step
    return 200


def pass_steps(signal: StopSignal, clock: Clock, count: int, seconds: float) -> None:
    for _ in range(count):
        clock.now += seconds
        assert not signal.agreed()


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 50, 200])
def test_long_steps_after_short_ones_wait_for_no_pause_of_theirs(
    count: int, axes: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if axes == 2:
        with_two_axes(monkeypatch)
    with StopSignal() as signal:
        with signal.other_steps():
            pass_steps(signal, clock, count, SHORT)
        assert steps_until_agreed(signal, clock, LONG) <= 2 * axes


@pytest.mark.parametrize("axes", [1, 2])
def test_short_steps_exchange_about_once_a_second(
    axes: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    if axes == 2:
        with_two_axes(monkeypatch)
    exchange = StopSignal._exchange

    def noted(signal: StopSignal) -> None:
        begun.append(clock.now)
        exchange(signal)

    monkeypatch.setattr(StopSignal, "_exchange", noted)
    with StopSignal() as signal:
        pass_steps(signal, clock, 7, LONG)
        with signal.other_steps():
            pass_steps(signal, clock, 500, SHORT)
    assert 9 <= len([moment for moment in begun if moment > 7 * LONG]) <= 13, "in ten seconds"
    assert begun[-1] - begun[-2] == pytest.approx(1.0, abs=2 * SHORT)


def evaluated(signal: StopSignal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(batch: object) -> None:
        clock.now += SHORT

    monkeypatch.setattr(evaluation, "LossMeter", lambda rank: SimpleNamespace(add=print, flush=dict))
    trainer: Any = SimpleNamespace(
        _pipeline=SimpleNamespace(params_gathered=nullcontext, evaluate=evaluate),
        callback_handler=SimpleNamespace(on_prediction_step=lambda *args: None),
        ranks=SimpleNamespace(context_parallel_rank=0),
        model=SimpleNamespace(chunks=[]),
        watch=SimpleNamespace(signal=signal, hang_detector=SimpleNamespace(enter=lambda *args: None)),
        before_forward=lambda batch: None,
        state=SimpleNamespace(global_step=1),
        control=None,
        args=None,
        _set_output=lambda: None,
        _rounds=lambda loader, what: iter(loader),
        _can_put_off=True,
    )
    EvaluationMixin._evaluate_loss(trainer, [None] * 200)  # type: ignore[arg-type]


def with_kept_reference(signal: StopSignal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mca_train.trainer.dpo.require_usable", lambda folder, sources: None)
    trainer: Any = SimpleNamespace(
        _reference=SimpleNamespace(name=lambda: "reference"),
        _precomputes=True,
        _alone=nullcontext,
        _with_log_probs=lambda *args: pass_steps(signal, clock, 200, SHORT),
        args=SimpleNamespace(output_dir="out"),
        model=SimpleNamespace(source=None),
        train_dataset=[],
        eval_dataset=None,
        watch=SimpleNamespace(signal=signal),
        release_first=lambda: None,
    )
    DpoTrainer._precompute_log_probs(trainer)


@pytest.mark.parametrize("phase", [evaluated, with_kept_reference])
def test_training_stops_soon_after(
    phase: Callable[..., None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopSignal() as signal:
        phase(signal, clock, monkeypatch)
        assert clock.now > 100 * SHORT
        assert steps_until_agreed(signal, clock, LONG) <= 2


def test_a_second_signal_ends_the_process_with_the_status_of_shells(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stop_signal.os, "_exit", ended.append)
    signal = StopSignal()
    for clock.now in (0.0, LONG, 2 * LONG):
        signal._handle(15, None)
    assert ended == [128 + 15] * 2
