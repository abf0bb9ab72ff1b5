"""A run that is stopped or killed at any step and then resumed logs and writes the same as one that is not."""

import contextlib
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import needed
from harness import run_ranks
from interruptions import Killed, interruption
from train_cases import make_trainer, quietly, samples, sparse_checkpoint, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

RUN = {
    "max_steps": 8,
    "gradient_accumulation_steps": 2,
    "count": 10,
    "learning_rate": 0.05,
}  # 5 steps an epoch
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
PLATEAU = EVALUATED | {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
    "warmup_steps": 0,
}
SAVED = {"save_strategy": "steps", "save_steps": 3}
BEST = EVALUATED | {"save_strategy": "best", "load_best_model_at_end": True}
EARLY = (
    EVALUATED | SAVED | {"save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2, "early": 2}
)
EPOCHS = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}
SHORT = SAVED | {"max_steps": -1, "num_train_epochs": 3, "steps_of_epochs": 3, "logging_steps": 5}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plateau": (4, PLATEAU | SAVED),
    "best": (4, BEST),
    "early stopping": (6, EARLY),
    "intervals of logs": (4, SAVED | {"logging_steps": 5}),
    "epochs": (5, EPOCHS | PLATEAU | {"eval_strategy": "epoch"}),
    "steps that end epochs": (5, EPOCHS | SAVED | {"save_steps": 5}),
    "begins with an evaluation": (4, EVALUATED | SAVED | {"eval_on_start": True}),
    "epochs that a callback ended": (4, SHORT),
    "in an epoch after one that a callback ended": (4, SHORT),
}
"""Runs, and the step at which they are interrupted; with `--cases all` at every step."""
TIMES = ("runtime", "per_second", "step_time", "tflops", "memory", "time", "slowest")


def ending_epochs(size: int) -> Any:
    """A callback that ends each epoch after ``size`` steps."""
    from transformers import TrainerCallback

    class EndEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.global_step % size == 0

    return EndEpoch()


def pausing(step: int) -> Any:
    """A callback that saves and ends the run after ``step``, by both flags."""
    from transformers import TrainerCallback

    class Pause(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                control.should_save = control.should_epoch_stop = control.should_training_stop = True

    return Pause()


def made(checkpoint: Path, output: Path, **changes: Any) -> Any:
    from transformers import EarlyStoppingCallback

    patience, size = changes.pop("early", None), changes.pop("steps_of_epochs", None)
    trainer = make_trainer(checkpoint, output, eval_dataset=samples(3, seed=9), **(RUN | changes))
    if size:
        trainer.add_callback(ending_epochs(size))
    if patience:
        trainer.add_callback(EarlyStoppingCallback(patience))
    return trainer


def reported(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log without times."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in lines
    ]


def outcome(trainer: Any, output: Path) -> dict[str, Any]:
    result = quietly(lambda: trainer.train(resume_from_checkpoint="auto"))
    lines = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    best = trainer.state.best_model_checkpoint
    return {
        "logged": reported(trainer.state.log_history),
        "lines": reported(lines),
        "train_loss": result.training_loss,
        "best": best and Path(best).name,
        "after": quietly(trainer.evaluate)["eval_loss"],
    }


def interrupted(checkpoint: Path, output: Path, step: int, how: str, **changes: Any) -> dict[str, Any]:
    """Return the results of a run that ended at ``step`` and was resumed."""
    first = made(checkpoint, output, **changes)
    first.add_callback(interruption(step, how))
    try:
        quietly(first.train)
    except Killed:
        pass
    return outcome(made(checkpoint, output, **changes), output)


KILLS = (7, 11)
HOWS = ("SIGTERM", "kill")


def beginning_epochs_anew(
    checkpoint: Path, output: Path, stops: Sequence[int] = KILLS, count: int = 10
) -> list[str]:
    """Return the arguments of a run of ``count`` samples with ``ignore_data_skip`` that is killed at ``stops``."""
    changes = {
        "count": count,
        "max_steps": -1,
        "num_train_epochs": len(stops) + 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    found: list[tuple[int, list[float]]] = []
    for name, kills in (("whole", ()), ("killed", stops)):
        for kill in (*kills, 0):
            trainer = made(checkpoint, output / name, ignore_data_skip=True, **changes)
            trainer.add_callback(interruption(kill, "kill" if kill else ""))
            with contextlib.suppress(Killed):
                quietly(lambda: trainer.train(resume_from_checkpoint="auto"))  # noqa: B023
        rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
        found.append((trainer.state.max_steps, rates))
    whole, killed = found
    return [] if killed == whole else [f"epochs begun anew: {killed} for {whole}"]


def going_on_after_a_pause(checkpoint: Path, output: Path) -> list[str]:
    """Return the missing results of a one-epoch run that a callback ended in the middle."""
    changes = {"max_steps": -1, "num_train_epochs": 1}
    first = made(checkpoint, output, **changes)
    first.add_callback(pausing(3))
    quietly(first.train)
    again = made(checkpoint, output, **changes)
    quietly(lambda: again.train(resume_from_checkpoint="auto"))
    steps = (first.state.global_step, again.state.global_step)
    return [] if steps == (3, 5) else [f"paused at step 3 of 5: {steps}"]


def differences(
    checkpoint: Path, output: Path, cases: dict[str, list[tuple[str, int]]]
) -> dict[str, list[str]]:
    """Return which interruptions of each run, by signal and step, changed something, and what."""
    found: dict[str, list[str]] = {}
    for name, interruptions in cases.items():
        changes, folder = CASES[name][1], output / name.replace(" ", "-")
        whole = outcome(made(checkpoint, folder / "whole", **changes), folder / "whole")
        assert whole["logged"]
        found[name] = []
        for how, step in interruptions:
            one = interrupted(checkpoint, folder / f"{how}{step}", step, how, **changes)
            found[name] += [
                f"{how} at {step}: {key}: {one[key]} for {whole[key]}"
                for key in whole
                if one[key] != whole[key]
            ]
    return found


def other_differences(checkpoint: Path, output: Path) -> list[str]:
    """Return the differences of runs that are ended several times, or by a callback."""
    return beginning_epochs_anew(checkpoint, output / "anew") + going_on_after_a_pause(
        checkpoint, output / "paused"
    )


def test_an_epoch_that_begins_again_makes_a_run_no_longer(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    (found,) = run_ranks(1, beginning_epochs_anew, model, tmp_path, (5,), 6)  # of 2 epochs of 3 steps
    assert found == []


@pytest.mark.qualify
def test_runs_that_stop_twice_or_by_a_callback_equal_uninterrupted_ones(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    (found,) = run_ranks(1, other_differences, model, tmp_path, timeout=600)
    assert found == []


@pytest.fixture(scope="module")
def differing(request, every_case, tmp_path_factory):
    folder, last = tmp_path_factory.mktemp("life"), RUN["max_steps"]
    model = tiny_checkpoint(folder / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    once = {name: [(HOWS[number % 2], CASES[name][0])] for number, name in enumerate(CASES)}
    everywhere = list(product(HOWS, range(1, last + 1)))
    cases = {name: everywhere if every_case else once[name] for name in needed(request, "name")}
    (found,) = run_ranks(1, differences, model, folder, cases, timeout=3600 if every_case else 600)
    return found


@pytest.mark.cases(
    0,
    always=[
        *("best", "epochs"),
        "in an epoch after one that a callback ended",
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_equals_an_uninterrupted_one(name, differing):
    assert differing[name] == []


def trained(checkpoint: Path, output: Path, last: int, **changes: Any) -> Any:
    """The logs of a run to step ``last``, from a checkpoint if there is one; its mean loss."""
    trainer = made(checkpoint, output, **changes)
    if last < trainer.args.max_steps:
        trainer.add_callback(interruption(last, "kill"))
    try:
        result = quietly(lambda: trainer.train(resume_from_checkpoint="auto"))
    except Killed:
        return None
    names = ("loss", "moe_load_balancing_loss", "num_input_tokens_seen")
    found = [log[name] for log in trainer.state.log_history for name in names if name in log]
    return [*found, result.training_loss]


@pytest.mark.qualify
def test_a_logging_interval_continues_on_another_layout(tmp_path):
    model = sparse_checkpoint(tmp_path / "model")
    run = {
        "max_steps": 8,
        "logging_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 5e-3,
    }
    run |= {"include_num_input_tokens_seen": True, "moe_router_load_balancing_type": "aux_loss"}
    run |= {"moe_aux_loss_coeff": 0.01}
    (whole,) = run_ranks(1, trained, model, tmp_path / "whole", 8, **run)
    assert len(whole) > 3
    split = run | {"gradient_accumulation_steps": 1}
    run_ranks(2, trained, model, tmp_path / "cut", 4, **split)
    for found in run_ranks(2, trained, model, tmp_path / "cut", 8, **run, pipeline_model_parallel_size=2):
        assert found == pytest.approx(whole, rel=1e-4)
