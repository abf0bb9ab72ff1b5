"""The order of a whole run, from the start and from a checkpoint, and what a saver writes: by the calls made."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from mca_train.batching.position import RunLength, RunPosition
from mca_train.checkpoint.training_state import LoopState, PendingEvents
from mca_train.trainer import loop as module
from mca_train.trainer import saver as saver_module
from mca_train.trainer.loop import Loop
from mca_train.trainer.saver import Saver

CHECKPOINT = Path("checkpoint-4")
POSITION = RunPosition(epoch=1, samples=4, epoch_samples=6, step_samples=2)
LENGTH = RunLength(steps_per_epoch=3, max_steps=9, num_epochs=3, schedule_steps=9, schedule_done=4)


def recorder(events: list[Any]) -> Any:
    """Return a function that makes functions which add their name and arguments to ``events``."""

    def report(name: str, result: Any = None) -> Any:
        return lambda *args, **named: (events.append((name, *args, *named.values())), result)[1]

    return report


def hugging_face(report: Any, step: int) -> Any:
    """Return a trainer whose state is at ``step``."""
    state = SimpleNamespace(global_step=step, max_steps=9, epoch=0.0)
    control = SimpleNamespace(should_training_stop=False, should_epoch_stop=False)
    args = SimpleNamespace(output_dir="out", eval_on_start=False, ignore_data_skip=False)
    return SimpleNamespace(
        state=state,
        control=control,
        args=args,
        ranks="ranks",
        callback_handler=SimpleNamespace(train_dataloader=None),
        fire=report("fire"),
        _evaluate=report("evaluate"),
        set_length=report("length"),
        set_optimizer=report("optimizer"),
        training_step=report("step"),
        model="model",
        watch=SimpleNamespace(
            stopped=False,
            stop_on_signal=report("signal", "pending"),
            hang_detector=SimpleNamespace(enter=report("enter")),
            stragglers=SimpleNamespace(forward="stopwatch"),
        ),
    )


def loop(events: list[Any], monkeypatch: pytest.MonkeyPatch, step: int = 0) -> Any:
    """Return a loop whose parts report to ``events``; its state is at ``step``."""
    report = recorder(events)
    sampler = SimpleNamespace(
        shape=SimpleNamespace(global_size=8),
        num_steps=3,
        steps_after=lambda samples: 3 - samples // 2,
        set_epoch=report("set epoch"),
        share=lambda samples: samples / 6,
    )
    training = SimpleNamespace(
        load_rng=report("rng"),
        load=report("load"),
        rate=SimpleNamespace(write=report("write rate")),
        engine=SimpleNamespace(optimizer=SimpleNamespace(param_groups="groups")),
    )
    made = Loop(
        hugging_face(report, step),
        runner=SimpleNamespace(training=training, load_weights=report("weights")),  # type: ignore[arg-type]
        data=SimpleNamespace(  # type: ignore[arg-type]
            train=lambda: ("loader", sampler),
            steps=lambda loader, sampler: iter(["batch 0", "batch 1"]),
            loaders=SimpleNamespace(seed_workers=report("seed")),
        ),
        log=SimpleNamespace(reset=report("reset"), restore=report("restore")),  # type: ignore[arg-type]
        evaluator=None,  # type: ignore[arg-type]
        saver=SimpleNamespace(  # type: ignore[arg-type]
            load_state=report("state", SimpleNamespace(pending="pending")),
            checkpoints=SimpleNamespace(advance=report("advance")),
            training_state=lambda: training,
            output=SimpleNamespace(remove_leftovers=report("leftovers")),
        ),
        progress=SimpleNamespace(position=None, started_at_step=None, pending=None),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(module, "naming_read_errors", lambda path: nullcontext())
    monkeypatch.setattr(module.directory, "load_position", report("position", POSITION))
    monkeypatch.setattr(module, "resume_position", lambda position, sampler: position)
    monkeypatch.setattr(module.RunLength, "from_arguments", report("compute length", LENGTH))
    monkeypatch.setattr(module, "log_plan", report("plan"))
    monkeypatch.setattr(module, "has_dropout", lambda model: model == "model")
    monkeypatch.setattr(module, "saved_weights", lambda model, path: (model, path))
    return made


def run(made: Any, events: list[Any], monkeypatch: pytest.MonkeyPatch, checkpoint: Path | None) -> Any:
    """Run ``made`` with epochs that advance the state by three steps and the position to its end."""
    report = recorder(events)

    def run_epoch(epoch: int, loader: Any, sampler: Any) -> None:
        events.append(("epoch", epoch, loader))
        made._hf.state.global_step += 3

    def prepare(length: RunLength, checkpoint: Path | None) -> Any:
        events.append(("prepare", length, checkpoint))
        return made._runner.training

    monkeypatch.setattr(made, "_prepare", prepare)
    monkeypatch.setattr(made, "_enter_epoch", lambda epoch, sampler: events.append(("enter", epoch)))
    monkeypatch.setattr(made, "_run_epoch", run_epoch)
    monkeypatch.setattr(made, "_catch_up", report("catch up"))
    monkeypatch.setattr(made, "_finish", lambda first, start: (first, start > 0))
    return made.run(checkpoint)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_from_the_start(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    made = loop(events, monkeypatch)
    made._hf.args.eval_on_start = evaluates
    assert run(made, events, monkeypatch, None) == (0, True)
    sampler = made._data.train()[1]
    assert events == [
        ("state", None),
        ("compute length", made._hf.args, sampler, RunPosition(), 0),
        ("prepare", LENGTH, None),
        ("plan", made._hf.args, "ranks", LENGTH, 8, 0),
        ("leftovers", None),
        ("fire", "on_train_begin"),
        *([("evaluate", None, None, True)] if evaluates else []),
        ("reset",),
        ("restore", SimpleNamespace(pending="pending")),
        *[each for epoch in range(3) for each in (("enter", epoch), ("epoch", epoch, "loader"))],
    ]
    assert made._progress.started_at_step == 0
    assert made._hf.callback_handler.train_dataloader == "loader"


@pytest.mark.parametrize(
    ("samples", "ended", "step", "over", "epochs"),
    [
        (4, False, 5, False, [1, 2]),
        (6, False, 6, True, [2]),
        (4, True, 6, True, [2]),
        (4, False, 9, True, []),
        (4, False, 8, False, [1]),
    ],
)
def test_a_run_from_a_checkpoint(
    samples: int, ended: bool, step: int, over: bool, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    made = loop(events, monkeypatch, step)
    position = replace(POSITION, samples=samples, epoch_ended=ended)
    monkeypatch.setattr(module.directory, "load_position", lambda path: position)
    assert run(made, events, monkeypatch, CHECKPOINT) == (step, True)
    names = [event for event in events if event[0] not in ("compute length", "plan")]
    assert names == [
        ("state", CHECKPOINT),
        ("prepare", LENGTH, CHECKPOINT),
        ("leftovers", CHECKPOINT),
        ("fire", "on_train_begin"),
        ("rng", CHECKPOINT, True),
        ("reset",),
        ("restore", SimpleNamespace(pending="pending")),
        ("catch up", "pending", over),
        *[each for epoch in epochs for each in (("enter", epoch), ("epoch", epoch, "loader"))],
    ]
    assert made._progress.started_at_step == step and made._progress.position == position


def test_no_epoch_begins_after_a_callback_ended_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    made = loop(events, monkeypatch)
    made._hf.control.should_training_stop = True
    run(made, events, monkeypatch, None)
    assert not any(event[0] in ("enter", "epoch") for event in events)


@pytest.mark.parametrize("checkpoint", [None, CHECKPOINT])
def test_weights_come_before_the_engine_and_its_state_after(
    checkpoint: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    made = loop(events, monkeypatch)
    made._progress.position = replace(POSITION, schedule_steps=3)
    report = recorder(events)
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups="groups"))
    rate = SimpleNamespace(move=report("move"), write_decay=report("decay"), scheduler="scheduler")
    monkeypatch.setattr(
        made._runner, "start", report("start", SimpleNamespace(engine=engine, rate=rate)), raising=False
    )
    assert made._prepare(LENGTH, checkpoint) is made._runner.training
    loaded = checkpoint is not None
    assert events == [
        ("length", LENGTH),
        *([("weights", CHECKPOINT)] if loaded else []),
        ("start", 9),
        *([("load", CHECKPOINT, ("model", CHECKPOINT)), ("move", 1)] if loaded else []),
        ("decay", "groups"),
        ("optimizer", engine.optimizer, "scheduler"),
    ]
    assert made._progress.position.schedule_steps == 4
    assert (engine.stopwatch, engine.assumed_counts) == ("stopwatch", [])


@pytest.mark.parametrize(
    ("epoch", "ignores", "expected"),
    [
        (2, False, replace(POSITION, epoch=2, samples=0, extra_steps=-1)),
        (2, True, replace(POSITION, epoch=2, samples=0, extra_steps=-1)),
        (1, False, POSITION),
        (1, True, replace(POSITION, samples=0, extra_steps=2)),
    ],
)
def test_the_position_moves_into_an_epoch(
    epoch: int, ignores: bool, expected: RunPosition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of six samples are trained: one step of two is left, and two are made."""
    made = loop([], monkeypatch)
    made._progress.position, made._hf.args.ignore_data_skip = POSITION, ignores
    made._enter_epoch(epoch, made._data.train()[1])
    assert made._progress.position == expected


@pytest.mark.parametrize(("stops", "stopped"), [(None, False), ("epoch", False), ("training", True)])
def test_each_step_of_an_epoch(stops: str | None, stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    made = loop(events, monkeypatch, step=3)
    made._progress.position = replace(POSITION, samples=0)
    made._watch.stopped = stopped
    for name in ("_request_log", "_log_evaluate_save", "_end_epoch"):
        monkeypatch.setattr(made, name, lambda name=name: events.append((name, made._hf.state.global_step)))

    def fire(name: str) -> None:
        events.append(("fire", name, made._hf.state.global_step))
        if name == "on_step_end" and stops is not None:
            setattr(made._hf.control, f"should_{stops}_stop", True)

    monkeypatch.setattr(made._hf, "fire", fire)
    made._run_epoch(1, "loader", made._data.train()[1])
    steps = [
        [
            ("write rate", "groups"),
            ("fire", "on_step_begin", 3 + number),
            ("step", f"batch {number}"),
            ("fire", "on_step_end", 4 + number),
            ("_request_log", 4 + number),
            ("signal", made._hf.control, 4 + number),
            ("advance",),
            ("_log_evaluate_save", 4 + number),
            ("enter", "reading the batch", 5 + number),
        ]
        for number in range(2 if stops is None else 1)
    ]
    assert events == [
        ("set epoch", 1, 0),
        ("seed", "loader", 1, 0),
        ("fire", "on_epoch_begin", 3),
        *[event for step in steps for event in step],
        *([] if stopped else [("_end_epoch", 3 + len(steps))]),
    ]
    assert made._progress.position == replace(POSITION, samples=2 * len(steps), schedule_steps=len(steps))
    assert made._hf.state.epoch == 1 + 2 * len(steps) / 6
    assert made._progress.pending == "pending"


def saver(events: list[Any], folder: Path, **args: Any) -> Any:
    """Return a saver at step 4 whose parts report to ``events``."""
    report = recorder(events)

    @contextmanager
    def gathered() -> Any:
        events.append("gather")
        yield
        events.append("release")

    plain = {"save_hf_model": False, "ckpt_format": "mca", "async_save": False, "save_only_model": False}
    state = TrainerState(global_step=4, max_steps=9, best_global_step=2, best_model_checkpoint="old")
    hf = SimpleNamespace(
        args=SimpleNamespace(
            **(plain | args), to_json_string=lambda: "arguments", per_device_train_batch_size=3
        ),
        state=state,
        control=SimpleNamespace(
            should_save=False,
            should_training_stop=False,
            should_epoch_stop=False,
            _new_training=report("new"),
        ),
        ranks="ranks",
        processing_class="tokenizer",
        fire=report("fire"),
        callback_states=lambda: {"callback": {}},
        _save_checkpoint=report("save"),
        model=SimpleNamespace(trained_parameters=lambda: "trained"),
        watch=SimpleNamespace(stopped=False),
    )
    pipeline = SimpleNamespace(params_gathered=gathered)
    training = SimpleNamespace(engine="engine", rate="rate")
    output: Any = SimpleNamespace(
        checkpoint_path=lambda step: folder / f"checkpoint-{step}",
        set_aside_same_step=report("set aside"),
        delete_old_checkpoints=report("delete"),
        verify_lock=report("lock"),
    )
    made = Saver(
        hf,  # type: ignore[arg-type]
        SimpleNamespace(pipeline=pipeline, training=training),  # type: ignore[arg-type]
        SimpleNamespace(loop_state=lambda: "loop state"),  # type: ignore[arg-type]
        SimpleNamespace(finish=report("finish"), write=report("write"), written=[]),  # type: ignore[arg-type]
        SimpleNamespace(position=POSITION, started_at_step=0),  # type: ignore[arg-type]
    )
    made.output = output
    return made


@pytest.mark.parametrize("is_best", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_written_after_the_one_before(
    is_best: bool, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    made = saver(events, tmp_path, async_save=background)
    monkeypatch.setattr(saver_module, "require_finite_weights", recorder(events)("finite"))
    state = made._hf.state
    state.best_global_step = 4 if is_best else 2
    made.save_checkpoint()
    target = tmp_path / "checkpoint-4"
    *before, (name, path, begin, after) = events
    assert before == ["gather", ("finite", 4, "trained"), "release", ("finish",), ("set aside", target)]
    assert (name, path, begin) == ("write", target, made._begin_checkpoint)
    best = str(target) if is_best else "old"
    assert state.best_model_checkpoint == best
    events.clear()
    state.global_step, state.best_model_checkpoint = 6, "newer"
    after()
    (_, kept), (_, event, passed) = events
    assert (event, kept) == ("on_save", best if background else "newer")
    assert (passed is state, passed.global_step) == (not background, 4 if background else 6)


@pytest.mark.parametrize("asked", [False, True])
def test_a_callback_of_a_saved_checkpoint_does_not_ask_for_another(asked: bool, tmp_path: Path) -> None:
    made = saver([], tmp_path)
    made._hf.control.should_save = asked
    made._hf.fire = lambda *_, **__: setattr(made._hf.control, "should_save", not asked)
    made._after_checkpoint(made._hf.state)
    assert made._hf.control.should_save is asked


@pytest.mark.parametrize(
    ("only_model", "stopped", "whole"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
def test_a_stopped_run_saves_the_training_state_too(
    only_model: bool, stopped: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    made = saver(events, tmp_path, save_only_model=only_model, ckpt_format="dist", save_hf_model=True)
    made._watch.stopped = stopped
    report = recorder(events)
    monkeypatch.setattr(saver_module, "ModelWriter", report("model", "model stage"))
    monkeypatch.setattr(saver_module, "Checksums", report("checksums", "checksum stage"))
    monkeypatch.setattr(saver_module, "run_on_first_rank", lambda work: work())
    state = SimpleNamespace(begin_save=report("training", "training stage"))
    monkeypatch.setattr(made, "training_state", lambda: state)
    stages = made._begin_checkpoint(tmp_path)
    assert stages == ["model stage", *(["training stage", "checksum stage"] if whole else [])]
    assert events == [
        "gather",
        ("model", made._model, tmp_path, "tokenizer", True, "dist", False),
        "release",
        ("lock",),
        *([("training", tmp_path, "loop state", False), ("checksums", tmp_path, "ranks")] if whole else []),
    ]
    saved = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (saved.global_step, saved.stateful_callbacks) == (4, {"callback": {}})
    assert "arguments" in [path.read_text() for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("step", "training_stop", "epoch_stop", "stopped", "ended", "expected"),
    [
        (4, False, False, False, False, False),
        (4, False, False, False, True, True),
        (4, False, True, False, False, True),
        (4, True, True, False, False, False),
        (9, True, True, False, False, True),
        (4, True, True, True, False, True),
        (4, True, False, False, False, False),
    ],
)
def test_an_epoch_that_a_callback_ended_is_over_unless_the_run_paused(
    step: int,
    training_stop: bool,
    epoch_stop: bool,
    stopped: bool,
    ended: bool,
    expected: bool,
    tmp_path: Path,
) -> None:
    made = saver([], tmp_path)
    made._hf.state.global_step, made._watch.stopped = step, stopped
    made._hf.control.should_training_stop, made._hf.control.should_epoch_stop = training_stop, epoch_stop
    made._progress.position = replace(POSITION, epoch_ended=ended)
    state = made.training_state()
    assert state._position == replace(POSITION, epoch_ended=expected)
    assert (state._engine, state._scheduler, state._ranks) == ("engine", "rate", "ranks")


@pytest.mark.parametrize(
    ("started", "written", "saves"),
    [(0, [], True), (4, [], False), (0, ["checkpoint-4"], False), (0, ["checkpoint-3"], True)],
)
def test_a_step_is_completed_once(started: int, written: list[str], saves: bool, tmp_path: Path) -> None:
    events: list[Any] = []
    made = saver(events, tmp_path)
    made._progress.started_at_step = started
    made.checkpoints.written = [tmp_path / name for name in written]
    made.complete_checkpoint()
    assert events == [("finish",), *([("save", made._model, None), ("finish",)] if saves else [])]


@pytest.mark.parametrize("hf", [False, True])
def test_a_saved_model_has_the_option_of_the_run(
    hf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    made = saver(events, tmp_path, save_hf_model=hf)
    stage = SimpleNamespace(finish=recorder(events)("written"))
    monkeypatch.setattr(saver_module, "ModelWriter", recorder(events)("model", stage))
    made.save_model(tmp_path)
    assert events == ["gather", ("model", made._model, tmp_path, "tokenizer", hf), ("written",), "release"]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("checkpoint", [None, "checkpoint-4"])
def test_the_state_of_a_run_is_new_or_the_checkpoints(
    checkpoint: str | None, resets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    report = recorder(events)
    made = saver(events, tmp_path)
    hf = made._hf
    hf.callback_handler = SimpleNamespace(callbacks="callbacks")
    hf.exportable, hf._load_callback_state = list, report("callback state")
    hf.is_world_process_zero, hf.is_local_process_zero = (lambda: True), (lambda: False)
    folder = None if checkpoint is None else tmp_path
    TrainerState(global_step=4, stateful_callbacks={"a": {}}).save_to_json(
        str(tmp_path / "trainer_state.json")
    )
    loaded = LoopState(pending=PendingEvents(save=True))
    for name, result in (("locate_best", None), ("reset_best_metric", resets), ("load_loop_state", loaded)):
        monkeypatch.setattr(saver_module.directory, name, report(name, result))
    for name in ("restore_counters", "reset_patience"):
        monkeypatch.setattr(saver_module, name, report(name))
    found = made.load_state(folder)
    assert found == (LoopState() if folder is None else loaded)
    state = hf.state
    assert (state.global_step, state.train_batch_size) == (0 if folder is None else 4, 3)
    assert (state.is_world_process_zero, state.is_local_process_zero) == (True, False)
    resumed: list[Any] = [
        ("locate_best", state, folder),
        ("restore_counters", "callbacks", {"a": {}}),
        ("callback state",),
        ("reset_best_metric", state, folder, hf.args),
        *([("reset_patience", "callbacks")] if resets else []),
        ("load_loop_state", folder),
    ]
    assert events == [*([] if folder is None else resumed), ("new",)]
