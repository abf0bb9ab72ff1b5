"""Parts of a trainer that its loop calls: loaders of datasets, evaluations, the engine, and the output directory."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError, UsageError
from mca_config.layout import ParallelLayout
from mca_train.batching.position import RunLength
from mca_train.batching.sampling import CountedSamples
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.trainer import evaluator, loaders, model_runner, saver
from mca_train.trainer.base import Progress
from mca_train.trainer.evaluator import EvaluationStopped, Evaluator
from mca_train.trainer.loaders import StepLoaders, log_plan
from mca_train.trainer.model_runner import ModelRunner, Training
from mca_train.trainer.saver import OutputDir


@dataclass
class Factory:
    """Loaders that note what is asked of them."""

    collate: object
    notes: list[Any]

    def __post_init__(self) -> None:
        self.train = lambda dataset: self.notes.append(("train", dataset)) or ("loader", "sampler")
        self.evaluation = lambda dataset: self.notes.append(("evaluation", dataset)) or ("loader", "sampler")
        self.keep_only = lambda datasets: self.notes.append(("keep", *datasets))


def data(notes: list[Any], *, train: Any = "train", evaluated: Any = "eval") -> Any:
    hf: Any = SimpleNamespace(
        train_dataset=train,
        eval_dataset=evaluated,
        data_collator="collator",
        state=SimpleNamespace(global_step=4),
        ranks="ranks",
    )
    stragglers = SimpleNamespace(reading=lambda steps: ("read", *steps))
    hf.watch = SimpleNamespace(stragglers=stragglers)
    made: Any = Factory("collator", notes)
    return StepLoaders(hf, made, Progress(started_at_step=4))


def test_loaders_follow_the_collator_of_the_trainer() -> None:
    made = data([])
    first = made.loaders
    assert made.loaders is first
    made._hf.data_collator = "another"
    assert made.loaders.collate == "another" and made.loaders is made.loaders is not first


def test_training_needs_a_dataset_and_keeps_those_of_the_trainer() -> None:
    notes: list[Any] = []
    assert data(notes).train() == ("loader", "sampler")
    assert notes == [("keep", "train", "eval"), ("train", "train")]
    with pytest.raises(McaError, match=r"^training needs a train_dataset \(train_file\)$"):
        data(notes, train=None).train()


@pytest.mark.parametrize(
    ("evaluated", "selected", "taken", "error"),
    [
        ("eval", None, "eval", None),
        ("eval", ["other"], ["other"], None),
        ({"a": "first", "b": "second"}, "b", "second", None),
        ({"a": "first", "b": "second"}, "c", None, "eval_dataset has no dataset 'c'; it has: a, b"),
        ("eval", "c", None, "eval_dataset has no dataset 'c'; it has: no names"),
        (None, None, None, r"evaluation needs an eval_dataset \(eval_file\)"),
    ],
)
def test_an_evaluation_has_the_dataset_that_is_selected(
    evaluated: Any, selected: Any, taken: Any, error: str | None
) -> None:
    notes: list[Any] = []
    made = data(notes, evaluated=[*evaluated] if evaluated == "eval" else evaluated)
    if taken == "eval":
        taken = [*"eval"]
    if error is not None:
        with pytest.raises(McaError, match=f"^{error}$"):
            made.evaluation(selected)
        return
    assert made.evaluation(selected) == "loader"
    own = evaluated.values() if isinstance(evaluated, dict) else [[*"eval"]]
    assert notes == [("keep", "train", *own, taken), ("evaluation", taken)]


@pytest.mark.parametrize(("step", "compares"), [(4, True), (5, False)])
@pytest.mark.parametrize("counted", [False, True])
def test_the_first_step_of_a_run_is_compared_between_ranks(
    step: int, compares: bool, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = data([])
    made._hf.state.global_step = step
    monkeypatch.setattr(loaders, "iterate_steps", lambda loader: ["steps"])
    monkeypatch.setattr(loaders, "check_first_step", lambda *given: given)
    samples = CountedSamples.__new__(CountedSamples)
    samples.samples = "samples"
    loader: Any = SimpleNamespace(dataset=samples if counted else object(), batch_sampler="rounds")
    found = made.steps(loader, "sampler")
    dataset = "samples" if counted else None
    expected = (("read", "steps"), "ranks", "sampler", "step 5", dataset) if compares else ("read", "steps")
    assert found == expected
    assert made.rounds(loader, "what") == (["steps"], "ranks", "rounds", "what")


@pytest.mark.parametrize(("done", "is_over"), [(8, False), (9, True), (10, True)])
def test_the_plan_of_a_run_is_logged(done: int, is_over: bool, caplog: Any) -> None:
    caplog.set_level("INFO")
    args: Any = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=3, sequence_packing=is_over
    )
    ranks: Any = SimpleNamespace(data_parallel_size=4, layout=ParallelLayout(tensor_model_parallel_size=2))
    length = RunLength(steps_per_epoch=5, max_steps=9, num_epochs=2, schedule_steps=9, schedule_done=0)
    log_plan(args, ranks, length, 24, done)
    first, *rest = caplog.messages
    assert first == (
        f"training 9 steps (5 per epoch) of 24 {'packs' if is_over else 'samples'}: micro-batch 2 x accumulation 3 x "
        f"data parallel 4; layout {ranks.layout}"
    )
    assert rest == ([f"nothing to train: step {done} is the end of the run already"] if is_over else [])


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An evaluator at step 4 of two rounds, whose parts report to ``events``."""
    events: list[Any] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *given: events.append((name, *given)) or result

    class Meter:
        def __init__(self, rank: int) -> None:
            events.append(("meter", rank))
            self.add = note("add")
            self.flush = lambda: SimpleNamespace(
                targets=made.targets, loss_sum=6.0, num_samples=8, checksum="sum"
            )

    @contextmanager
    def within(name: str, value: Any) -> Any:
        events.append(name)
        yield value
        events.append(f"end of {name}")

    hf: Any = SimpleNamespace(
        ranks=SimpleNamespace(context_parallel_rank=3),
        state=SimpleNamespace(global_step=4),
        callback_handler=SimpleNamespace(eval_dataloader=None),
        log=lambda metrics: events.append(("log", metrics)),
        fire=note("fire"),
        before_forward=note("before"),
        watch=SimpleNamespace(
            hang_detector=SimpleNamespace(enter=note("enter")),
            signal=SimpleNamespace(agreed=lambda: made.stops),
        ),
    )
    pipeline = SimpleNamespace(evaluate=lambda batch: f"loss of {batch}")
    runner: Any = SimpleNamespace(evaluating=lambda: within("evaluating", pipeline))
    loaders: Any = SimpleNamespace(
        evaluation=lambda dataset: [dataset, dataset], rounds=lambda loader, what: iter(["first", "second"])
    )
    custom = SimpleNamespace(flush=lambda: {"accuracy": 0.5})
    log: Any = SimpleNamespace(separate_metrics=lambda: within("metrics", custom))
    made: Any = Evaluator(hf, runner, loaders, log)
    made.events, made.targets, made.stops, made.hf = events, [1.0, 3.0], False, hf
    monkeypatch.setattr(evaluator, "LossMeter", Meter)
    monkeypatch.setattr(evaluator, "require_same_samples", note("same"))
    monkeypatch.setattr(evaluator, "run_on_first_rank", lambda call: call() | {"shared": 1})
    monkeypatch.setattr(
        evaluator,
        "speed_metrics",
        lambda prefix, started, num_samples, num_steps: {f"{prefix}_speed": (num_samples, num_steps)},
    )
    return made


@pytest.mark.parametrize("targets", [[1.0, 3.0], [0.0]])
def test_an_evaluation_logs_the_mean_over_all_targets(
    evaluation: Any, targets: list[float], caplog: Any
) -> None:
    evaluation.targets = targets
    metrics = evaluation.evaluate("data", "test")
    loss = {"test_loss": 1.5} if sum(targets) else {}
    assert metrics == loss | {"test_accuracy": 0.5, "test_speed": (8, 2), "shared": 1}
    rounds = [
        [
            ("enter", "evaluating", 4),
            ("before", batch),
            ("add", f"loss of {batch}", batch),
            ("fire", "on_prediction_step"),
        ]
        for batch in ("first", "second")
    ]
    assert evaluation.events == [
        "metrics",
        ("meter", 3),
        "evaluating",
        *(event for each in rounds for event in each),
        "end of evaluating",
        "end of metrics",
        ("same", evaluation.hf.ranks, "sum", "evaluation"),
        ("log", metrics),
        ("fire", "on_evaluate", metrics),
    ]
    assert evaluation.hf.callback_handler.eval_dataloader == ["data", "data"]
    warned = ["the evaluation has no test_loss: the loss of its 8 samples is over 0 targets"] * (not loss)
    assert [message.partition(" (")[0] for message in caplog.messages] == warned


def test_a_signal_ends_an_evaluation_where_it_may_be_repeated(evaluation: Any) -> None:
    evaluation.stops = True
    assert evaluation.evaluate("data", "eval")["eval_loss"] == 1.5
    evaluation.events.clear()
    with pytest.raises(EvaluationStopped), evaluation.stopping_on_signal():
        evaluation.evaluate("data", "eval")
    assert ("before", "second") not in evaluation.events and ("before", "first") in evaluation.events
    evaluation.stops = False
    with evaluation.stopping_on_signal():
        assert evaluation.evaluate("data", "eval")["eval_loss"] == 1.5


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner whose parts report to ``events``."""
    events: list[Any] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *given, **more: events.append((name, *given, *more.values())) or result

    @contextmanager
    def gathered() -> Any:
        events.append("gathered")
        yield

    engine = SimpleNamespace(
        update_learning_rates=note("rates"),
        reload_main_params=note("reload"),
        require_active_engine=note("active"),
        params_gathered=gathered,
    )
    forward = SimpleNamespace(params_gathered=gathered)
    for name, result in (
        ("smooth_labels", None),
        ("chunk_losses", None),
        ("load_weights", None),
        ("select_trained_parts", None),
        ("run_rate", "rate"),
        ("Engine", engine),
        ("Pipeline", forward),
        ("preserved_rng", nullcontext()),
        ("preserved_output", nullcontext()),
    ):
        monkeypatch.setattr(model_runner, name, note(name, result))
    model: Any = SimpleNamespace(chunks=("chunk",), config=SimpleNamespace(vocab_size=10))
    args: Any = SimpleNamespace(label_smoothing_factor=0.1, loss_chunk_size=8)
    hooks = {"wants_logits": True, "token_values": "values", "num_items": "items"}
    made: Any = ModelRunner(SimpleNamespace(model=model, args=args, **hooks), "loss")  # type: ignore[arg-type]
    made.events, made.engine, made.forward, made.model, made.args = events, engine, forward, model, args
    return made


OUTPUT = [("smooth_labels", ("chunk",), 0.1, 10), ("chunk_losses", ("chunk",), 8, True, "values", 10)]


def test_a_model_runs_forward_before_it_trains(runner: Any) -> None:
    assert runner.events == [*OUTPUT, ("Pipeline", ["chunk"], "loss", True)]
    assert runner.pipeline is runner.forward
    with pytest.raises(McaError, match=r"trainer.engine exists once train\(\) has started"):
        _ = runner.training
    runner.events.clear()
    runner.require_active_engine()
    runner.load_weights(Path("a"))
    with runner.evaluating() as pipeline:
        assert pipeline is runner.forward
    assert runner.events == [
        ("load_weights", runner.model, Path("a")),
        ("preserved_rng",),
        ("preserved_output", ("chunk",)),
        "gathered",
        *OUTPUT,
    ]


def test_an_engine_is_built_once_and_has_the_rates_of_each_run(runner: Any) -> None:
    runner.events.clear()
    training = runner.start(9)
    assert training == Training(runner.engine, "rate") == runner.training  # type: ignore[arg-type]
    assert runner.pipeline is runner.engine
    assert runner.events == [
        ("run_rate", runner.args, 9),
        ("select_trained_parts", runner.model, runner.args),
        ("Engine", ["chunk"], runner.args, "loss", True, "items"),
    ]
    runner.events.clear()
    assert runner.start(5).engine is runner.engine
    runner.require_active_engine()
    runner.load_weights(Path("a"))
    assert runner.events == [
        ("run_rate", runner.args, 5),
        ("rates", runner.args),
        ("active",),
        ("load_weights", runner.model, Path("a")),
        ("reload",),
    ]


def directory(folder: Path, *, is_first: bool = True, started: int = 0, **args: Any) -> OutputDir:
    plain = {"save_strategy": "steps", "overwrite_output_dir": False, "save_total_limit": None}
    hf: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder), **(plain | args)),
        ranks=SimpleNamespace(is_first=is_first),
        state=SimpleNamespace(global_step=started),
    )
    return OutputDir(hf, CheckpointWriter(in_background=False), Progress(started_at_step=started))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints after 2, 4 and 6 steps."""
    monkeypatch.setattr(saver, "run_on_first_rank_unwrapped", lambda call: call())
    monkeypatch.setattr(saver, "name_errors", lambda path: nullcontext())
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("is_first", "overwrite", "resumed", "left"),
    [
        (False, True, None, ["2", "4", "6"]),
        (True, False, 4, ["2", "4", "6"]),
        (True, True, 4, ["2", "4", "6.set-aside"]),
        (True, True, None, []),
    ],
)
def test_a_run_begins_by_removing_what_killed_and_other_runs_left(
    is_first: bool,
    overwrite: bool,
    resumed: int | None,
    left: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = directory(folder, is_first=is_first, overwrite_output_dir=overwrite, started=resumed or 0)
    checkpoint = None if resumed is None else folder / f"checkpoint-{resumed}"
    made.claim(checkpoint)
    removed: list[Any] = []
    monkeypatch.setattr(saver, "remove_unfinished", lambda *given: removed.append(given))
    made.remove_leftovers(checkpoint)
    assert removed == [(folder, "checkpoint")] * is_first
    assert names(folder) == left


def test_a_directory_of_another_run_is_not_claimed(folder: Path) -> None:
    made = directory(folder)
    with pytest.raises(UsageError, match="holds the checkpoints of another run"):
        made.claim(None)
    assert not made.has_claimed
    made.claim(folder / "checkpoint-4")
    assert made.has_claimed and made.checkpoint_path(7) == folder / "checkpoint-7"
    made._hf.args.output_dir = str(folder / "other")
    assert not made.has_claimed


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, ["2", "4", "6.set-aside", "8"]),
        (2, None, ["4", "6.set-aside", "8"]),
        (2, 2, ["2", "6.set-aside", "8"]),
    ],
)
def test_a_resumed_run_keeps_later_checkpoints_under_another_name(
    limit: int | None, best: int | None, left: list[str], folder: Path
) -> None:
    made = directory(folder, save_total_limit=limit, started=4)
    made.claim(folder / "checkpoint-4")
    (folder / "checkpoint-8").mkdir()
    (folder / "checkpoint-8" / "trainer_state.json").write_text("{}")
    made._checkpoints.written.append(folder / "checkpoint-8")
    made.delete_old_checkpoints(None if best is None else str(folder / f"checkpoint-{best}"))
    made._checkpoints._wait_for_room()
    assert names(folder) == left


@pytest.mark.parametrize(("strategy", "warns"), [("steps", True), ("no", False)])
def test_a_new_round_replaces_the_checkpoints_of_the_one_before(
    strategy: str, warns: bool, folder: Path, caplog: Any
) -> None:
    made = directory(folder, overwrite_output_dir=True, save_strategy=strategy)
    made.claim(None)
    made._checkpoints.written.append(folder / "checkpoint-2")
    made.claim(None)
    assert made._checkpoints.written == []
    assert len(caplog.messages) == warns
    made.set_aside_same_step(folder / "checkpoint-6")
    made.remove_leftovers(None)
    assert names(folder) == ["2", "4", "6"], "until one is written"
    made._checkpoints.written.append(folder / "checkpoint-4")
    made.delete_old_checkpoints(None)
    made._checkpoints._wait_for_room()
    assert names(folder) == ["4"]


@pytest.mark.parametrize(
    ("target", "written", "left"), [(6, [], "6.set-aside"), (6, [6], "6"), (4, [], "4"), (2, [], "2")]
)
def test_a_checkpoint_of_the_same_step_is_kept_if_it_is_later_than_the_resumed_one(
    target: int, written: list[int], left: str, folder: Path
) -> None:
    made = directory(folder, started=4)
    made.claim(folder / "checkpoint-4")
    made._checkpoints.written += [folder / f"checkpoint-{step}" for step in written]
    made.set_aside_same_step(folder / f"checkpoint-{target}")
    expected = [left if step == target else str(step) for step in (2, 4, 6)]
    assert names(folder) == expected


@pytest.mark.parametrize("given", [False, True])
def test_a_directory_is_locked_while_a_run_writes(
    given: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    def lock(path: Path) -> Any:
        return SimpleNamespace(
            take=lambda: events.append(("take", path)),
            release=lambda: events.append("release"),
            verify=lambda: events.append("verify"),
        )

    monkeypatch.setattr(saver, "OutputLock", lock)
    made = directory(folder)
    made.verify_lock()
    if given:
        made.lock = lock(folder)
    with pytest.raises(KeyError), made.locked():
        made.verify_lock()
        raise KeyError
    assert events == (["verify"] if given else [("take", folder), "verify", "release"])
    assert (made.lock is not None) == given
