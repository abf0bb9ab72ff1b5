"""An evaluation without a target has no loss, says so, and decides nothing."""

import logging
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from train_cases import history, make_trainer, quietly, samples, tiny_checkpoint

pytestmark = pytest.mark.ranks


def without_targets(count: int) -> Any:
    from mca_train import TokenDataset

    rows = samples(count)
    return TokenDataset.from_samples(
        [(row["input_ids"], row["input_ids"] < 0) for row in map(rows.__getitem__, range(count))]
    )


def evaluated(checkpoint: Path, output: Path) -> dict[str, Any]:
    """Evaluations by name, and a run that evaluates what has no target: with nothing that follows it, and with."""
    from mca_config.errors import McaError

    found: dict[str, Any] = {}
    run = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": without_targets(3)}
    trainer = make_trainer(checkpoint, output / "run", **run)
    handler = BufferingHandler(1000)
    logging.getLogger("mca_train.trainer.evaluator").addHandler(handler)
    logging.disable(logging.NOTSET)
    both = {"some": samples(2), "none": without_targets(2)}
    found["losses"] = [name for name in quietly(lambda: trainer.evaluate(both)) if name.endswith("_loss")]
    quietly(trainer.train)
    found["steps"] = history(trainer, "loss"), history(trainer, "eval_loss"), history(trainer, "eval_runtime")
    found["reported"] = [record.getMessage() for record in handler.buffer]
    followed = make_trainer(checkpoint, output / "followed", metric_for_best_model="loss", **run)
    with pytest.raises(McaError) as error:
        quietly(followed.train)
    return found | {"refused": str(error.value)}


def test_an_evaluation_without_a_target_has_no_loss(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1)
    (found,) = run_ranks(1, evaluated, checkpoint, tmp_path)
    assert found["losses"] == ["eval_some_loss"]
    assert [len(numbers) for numbers in found["steps"]] == [2, 0, 2]
    named, *others = found["reported"]
    assert named.startswith(
        "the evaluation has no eval_none_loss: the loss of its 2 samples is over 0 targets"
    )
    assert [line.partition(":")[0] for line in others] == ["the evaluation has no eval_loss"] * 2
    assert found["refused"].startswith(
        "metric_for_best_model is 'loss', which the evaluation does not report"
    )
