"""The loss scale of fp16: steps that it skips, and what becomes of it when a run goes on."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from optimizer_states import resumed_before_the_first_update
from train_cases import history, make_trainer, quietly, sparse_checkpoint, tiny_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def overflowing(checkpoint: Path, output_dir: Path) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Logs and errors of runs: one asks for fp16, one has a checkpoint in float16, one a least loss scale."""
    from mca_config.errors import McaError

    half = output_dir.with_name("half")
    shutil.copytree(checkpoint, half)
    document = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(document | {"dtype": "float16"}))
    changes = {"fp16": True, "initial_loss_scale": 2.0**60, "hysteresis": 1}
    runs = [(checkpoint, output_dir, changes), (half, output_dir.with_name("of half"), {})]
    runs += [(checkpoint, output_dir.with_name("least"), changes | {"min_loss_scale": 2.0**59})]
    found = [overflowed(*run[:2], **run[2]) for run in runs]
    for name, changes in {"muon": {"optimizer": "muon"}, "nan": {"check_for_nan_in_grad": True}}.items():
        with pytest.raises(
            McaError, match=r"with fp16 needs loss_scale|muon excludes fp16|optimizer muon needs"
        ):
            make_trainer(half, output_dir / name, **changes)
    return [logs for logs, _ in found], [error for _, error in found]


def overflowed(checkpoint: Path, output_dir: Path, **changes: Any) -> tuple[list[dict[str, Any]], str]:
    from mca_config.errors import McaError

    trainer = make_trainer(checkpoint, output_dir, max_steps=3, save_strategy="steps", **changes)
    try:
        quietly(trainer.train)
    except McaError as error:
        return trainer.state.log_history, str(error)
    return trainer.state.log_history, "no error"


def test_skipped_steps_are_counted_and_a_run_of_nothing_else_fails(checkpoint, tmp_path):
    (((logs, of_half, at_least), (error, *_)),) = run_ranks(1, overflowing, checkpoint, tmp_path / "run")
    assert [log["skipped_steps"] for log in logs if "loss" in log] == [1, 1, 1]
    assert [log["loss_scale"] for log in logs if "loss" in log] == [2.0**59, 2.0**58, 2.0**57]
    assert [log["loss_scale"] for log in at_least if "loss" in log] == [2.0**59] * 3
    assert logs[1]["learning_rate"] == logs[0]["learning_rate"], "a skipped step moves no schedule"
    assert error.startswith("all 3 steps of the run were skipped") and "lower initial_loss_scale" in error
    assert not list(tmp_path.glob("*/checkpoint-*")), "a model that has not changed is not saved"
    assert {"loss_scale", "skipped_steps"} <= of_half[0].keys(), "fp16 by config.json is fp16"


def overflowing_once(checkpoint: Path, output_dir: Path) -> tuple[list[float], list[int]]:
    """The loss scale of each optimizer after one step in which an embedding's gradient alone is no number."""
    from transformers import TrainerCallback

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                named = dict(trainer.model.chunks[0].named_parameters())
                named["embedding.word_embeddings.weight"].main_grad[0, 0] = float("inf")

    changes = {"expert_model_parallel_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    scale = {"fp16": True, "initial_loss_scale": 256.0, "hysteresis": 1}
    trainer = make_trainer(checkpoint, output_dir, **changes, **scale)
    trainer.add_callback(Overflow())
    quietly(trainer.train)
    scales = [float(single.get_loss_scale()) for single in trainer.engine.optimizer.chained_optimizers]
    return scales, [int(log.get("skipped_steps", 0)) for log in trainer.state.log_history if "loss" in log]


def test_experts_have_the_loss_scale_that_losses_have(tmp_path):
    model = sparse_checkpoint(tmp_path / "model", num_hidden_layers=2)
    for scales, skipped in run_ranks(2, overflowing_once, model, tmp_path / "out"):
        assert scales == [128.0, 128.0]
        assert skipped == [0, 1, 0]


@pytest.mark.qualify
def test_a_checkpoint_before_the_first_update_resumes(checkpoint, tmp_path):
    for straight, resumed in run_ranks(1, resumed_before_the_first_update, checkpoint, tmp_path)[0]:
        assert straight["skipped_steps"][0] == 1
        assert 0 in straight["skipped_steps"]
        assert resumed == straight


def with_other_scaling(checkpoint: Path, output_dir: Path) -> list[list[float]]:
    """Loss scales of runs that go on: from one with a given scale, and with a shorter window than was counted."""
    found, scale = [], {"initial_loss_scale": 64.0, "loss_scale_window": 2}
    for steps, before in ((1, {"loss_scale": 1024.0}), (3, scale | {"loss_scale_window": 9})):
        run = {"fp16": True, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": steps}
        new = partial(make_trainer, checkpoint, output_dir / str(steps), **run)
        quietly(new(max_steps=steps, **before).train)
        trainer = new(max_steps=steps + 1, **scale)
        quietly(partial(trainer.train, resume_from_checkpoint=True))
        found.append(history(trainer, "loss_scale"))
    return found


def test_a_run_goes_on_with_other_settings_of_the_loss_scale(checkpoint, tmp_path):
    assert run_ranks(1, with_other_scaling, checkpoint, tmp_path)[0] == [[1024, 64], [64, 64, 64, 128]]
