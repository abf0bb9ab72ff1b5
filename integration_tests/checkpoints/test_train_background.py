"""``async_save``: a checkpoint is written while training goes on, and is complete or not there."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from interruptions import stop_at
from train_cases import history, make_trainer, quietly, samples, tiny_checkpoint
from train_settings import ASYNC, ZERO

pytestmark = pytest.mark.ranks

SAVING = ASYNC | {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
SAVING |= {"gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


class Writer:
    """Stands before Megatron's writer of a rank's file: waits for a word, or fails. Other checkpoints are let pass.

    A file in ``folder`` is the word, for the writer is another process.
    """

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.open, self.broken, self.failed = (folder / word for word in ("open", "broken", "failed"))

    def install(self) -> None:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        original = FileSystemWriterAsync.write_preloaded_data

        def write(*args: Any, **kwargs: Any) -> Any:
            if self.checkpoint not in str(kwargs["write_bucket"][0]):
                return original(*args, **kwargs)
            while not self.open.exists():
                time.sleep(0.01)
            if self.broken.exists() and os.environ["RANK"] == "1":
                bucket = kwargs["write_bucket"]
                kwargs["write_bucket"] = (f"{bucket[0]}/not/there", *bucket[1:])
                self.failed.touch()
            return original(*args, **kwargs)

        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


def recorder(trainer: Any, folder: Path, writer: Writer) -> Any:
    """A callback that holds the writer of step 4 until step 5 is over, and notes what it hears of."""
    from transformers import TrainerCallback

    class Record(TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[tuple[int, int, bool]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5 and trainer.ranks.is_first:
                writer.open.touch()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved = folder / f"checkpoint-{state.global_step}"
            self.heard.append((state.global_step, trainer.state.global_step, saved.is_dir()))

    return Record()


def best_and_rotated(checkpoint: Path, output_dir: Path, words: Path) -> dict[str, Any]:
    writer = Writer(words, "checkpoint-4")
    best = {
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 0.05,
        "eval_dataset": samples(2, seed=9),
    }
    trainer = make_trainer(checkpoint, output_dir, **ZERO | SAVING | best)
    writer.install()
    record = recorder(trainer, output_dir, writer)
    trainer.add_callback(record)
    quietly(trainer.train)
    return {
        "heard": record.heard,
        "best": trainer.state.best_model_checkpoint,
        "eval": history(trainer, "eval_loss"),
        "after": quietly(trainer.evaluate)["eval_loss"],
    }


def test_training_goes_on_and_the_rest_of_the_trainer_knows(checkpoint, tmp_path):
    (tmp_path / "words").mkdir()
    output = tmp_path / "run"
    for found in run_ranks(2, best_and_rotated, checkpoint, output, tmp_path / "words"):
        assert [(step, there) for step, _, there in found["heard"]] == [(n, True) for n in (2, 4, 6)]
        assert found["heard"][1][1] in (5, 6), "step 5 was trained before checkpoint 4 was complete"
        assert found["after"] == pytest.approx(min(found["eval"]), rel=1e-6)
    names = {path.name for path in output.glob("checkpoint-*")}
    assert {"checkpoint-6", Path(found["best"]).name} <= names
    assert len(names) == 2


def fails(checkpoint: Path, output_dir: Path, words: Path) -> dict[str, Any]:
    """A run of which rank 1 cannot write its part of checkpoint 4."""
    from mca_config.errors import McaError

    writer = Writer(words, "checkpoint-4")
    writer.open.touch()
    writer.broken.touch()
    trainer = make_trainer(checkpoint, output_dir, **ZERO | SAVING)
    writer.install()
    step = trainer.training_step

    def spoil(batch: Any) -> Any:
        while trainer.state.global_step == 4 and not writer.failed.exists():
            time.sleep(0.01)
        return step(batch)

    trainer.training_step = spoil
    try:
        quietly(trainer.train)
    except McaError as error:
        return {"reported": str(error), "step": trainer.state.global_step}
    return {"reported": "nothing", "step": trainer.state.global_step}


def test_a_failed_write_is_told_by_every_rank_at_the_next_step(checkpoint, tmp_path):
    (tmp_path / "words").mkdir()
    output = tmp_path / "run"
    for found in run_ranks(2, fails, checkpoint, output, tmp_path / "words"):
        assert found["step"] in (5, 6)  # the writer's process may outlive its failure by a step
        assert found["reported"].startswith(
            f"{output}/checkpoint-4: cannot be written: rank 1 could not save: "
        )
        assert "No such file or directory" in found["reported"]
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]


def ends_early(checkpoint: Path, output_dir: Path, words: Path) -> dict[str, Any]:
    """SIGTERM in the one run, a gradient that is no number in the other, each while a checkpoint is being written."""
    import torch

    from mca_config.errors import McaError

    writer = Writer(words, "checkpoint-")
    trainer = make_trainer(checkpoint, output_dir / "stopped", **SAVING | {"max_steps": 100})
    writer.install()
    trainer.add_callback(stop_at(3, 0))
    threading.Timer(0.5, writer.open.touch).start()
    quietly(trainer.train)
    again = make_trainer(checkpoint, output_dir / "poisoned", **SAVING)
    step = again.training_step

    def poison(batch: Any) -> Any:
        if again.state.global_step == 2:
            writer.open.unlink()
            threading.Timer(0.5, writer.open.touch).start()
            (_, tensor), *_ = again.model.local_params()
            tensor.register_hook(lambda gradient: gradient * torch.nan)
        return step(batch)

    again.training_step = poison
    with pytest.raises(McaError, match="step 3: the gradient norm is nan"):
        quietly(again.train)
    return {"stopped": trainer.state.global_step, "handler": signal.getsignal(signal.SIGTERM)}


def test_what_is_being_written_is_completed_when_a_run_ends_early(checkpoint, tmp_path):
    from mca_train.checkpoint.output_files import checkpoints

    (tmp_path / "words").mkdir()
    (found,) = run_ranks(1, ends_early, checkpoint, tmp_path, tmp_path / "words")
    assert found["stopped"] == 3
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["checkpoint-2", "checkpoint-3"]
    assert [path.name for path in checkpoints(tmp_path / "poisoned")] == ["checkpoint-2"]
    assert not list(tmp_path.glob("*/*.partial-*"))
