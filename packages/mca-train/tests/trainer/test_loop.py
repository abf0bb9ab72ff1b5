"""The parts of one step, in their order and with its number."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.batching.position import RunPosition
from mca_train.trainer.loop import Loop


def loop(events: list[Any], *, updated: bool = True, **hf: Any) -> Any:
    """Return a stand-in of a loop whose parts report to ``events``."""

    def report(name: str, result: Any = None) -> Any:
        return lambda *values: events.append((name, *values)) or result

    engine = SimpleNamespace(
        forward_backward=report("backward", "loss"),
        optimizer_step=report("update", SimpleNamespace(updated=updated)),
    )
    rate = SimpleNamespace(step=report("rate"), value=0.5)
    return SimpleNamespace(
        _hf=SimpleNamespace(fire=report("fire"), before_forward=report("before"), **hf),
        _runner=SimpleNamespace(training=SimpleNamespace(engine=engine, rate=rate)),
        _watch=SimpleNamespace(hang_detector=SimpleNamespace(enter=report("enter"))),
        _logger=SimpleNamespace(
            add_step=report("add"),
            end_step=lambda result, loss, rate, engine: events.append(("end", loss, rate)),
        ),
    )


@pytest.mark.parametrize("updated", [False, True])
def test_a_step_is_reported_by_its_number_and_moves_the_rate_if_it_updates(updated: bool) -> None:
    events: list[Any] = []
    made = loop(events, updated=updated, state=SimpleNamespace(global_step=3))
    batch: Any = "batch"
    assert Loop.step(made, batch).updated is updated
    assert events == [
        ("enter", "forward and backward", 4),
        ("before", "batch"),
        ("backward", "batch"),
        ("add", "loss", "batch"),
        ("fire", "on_pre_optimizer_step"),
        ("enter", "the optimizer", 4),
        ("update",),
        ("end", "loss", 0.5),
        ("fire", "on_optimizer_step"),
        *([("rate",)] if updated else []),
    ]


@pytest.mark.parametrize(
    ("step", "strategy", "logs"),
    [(1, "steps", True), (2, "steps", False), (9, "steps", True), (9, "epoch", False), (1, "no", False)],
)
def test_the_first_and_the_last_step_are_logged_if_steps_are(step: int, strategy: str, logs: bool) -> None:
    control = SimpleNamespace(should_log=False)
    made = loop(
        [],
        state=SimpleNamespace(global_step=step, max_steps=9),
        args=SimpleNamespace(logging_strategy=strategy),
        control=control,
    )
    Loop._request_log(made)
    assert control.should_log is logs


def test_checkpoints_are_saved_by_the_method_that_users_override() -> None:
    events: list[Any] = []
    control = SimpleNamespace(
        should_log=False, should_evaluate=False, should_training_stop=False, should_save=True
    )
    made = loop(
        events,
        state=SimpleNamespace(global_step=2),
        control=control,
        _save_checkpoint=lambda *values: events.append(values),
    )
    made._model, made._progress = "model", SimpleNamespace(started_at_step=0)
    made._logger.meter = SimpleNamespace(pause=nullcontext)
    made._saver = SimpleNamespace(checkpoints=SimpleNamespace(finishing_on_error=nullcontext))
    Loop._log_evaluate_save(made)
    assert events == [("enter", "saving", 2), ("model", None)]
    assert not control.should_save


def test_workers_are_seeded_by_the_epoch_and_the_first_sample() -> None:
    events: list[Any] = []
    made = loop(events, args=SimpleNamespace(ignore_data_skip=False))
    made._progress = SimpleNamespace(position=RunPosition(epoch=2, samples=6))
    seeded = SimpleNamespace(seed_workers=lambda *values: events.append(("seed", *values)))
    made._data = SimpleNamespace(loaders=seeded, steps=lambda *_: ())
    made._watch.stopped = True
    sampler: Any = SimpleNamespace(
        steps_after=lambda samples: 1, set_epoch=lambda *values: events.append(("epoch", *values))
    )
    loader: Any = "loader"
    Loop._run_epoch(made, 2, loader, sampler)
    assert events == [("epoch", 2, 6), ("seed", "loader", 2, 6), ("fire", "on_epoch_begin")]
