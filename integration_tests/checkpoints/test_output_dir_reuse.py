"""Runs that start, restart and resume in one ``output_dir``: their checkpoints never mix."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from train_cases import make_trainer, quietly, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


def trained(
    checkpoint: Path, output_dir: Path, max_steps: int, resume: str | None, **changes: Any
) -> list[str]:
    """Train with a checkpoint at every second step, of which two are kept; return those that are left."""
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": max_steps}
    settings |= {"gradient_accumulation_steps": 1}
    trainer = make_trainer(checkpoint, output_dir, **settings | changes)
    quietly(lambda: trainer.train(resume_from_checkpoint=resume and str(output_dir / resume)))
    return standing(output_dir)


def standing(output_dir: Path) -> list[str]:
    return sorted(path.name.removeprefix("checkpoint-") for path in output_dir.glob("checkpoint-*"))


def refused(checkpoint: Path, output_dir: Path, resume: Path | None) -> list[Any]:
    """Return why a run cannot start in ``output_dir``, and the files that are left there."""
    from mca_config.errors import UsageError

    trainer = make_trainer(checkpoint, output_dir)
    with pytest.raises(UsageError) as error:
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return [str(error.value), standing(output_dir)]


def of_another_kind(checkpoint: Path, output_dir: Path, resume: Path) -> str:
    """Return the error of preference tuning that resumes the checkpoint of another kind of run."""
    from dpo_reference import pairs
    from mca_config.errors import UsageError
    from mca_train import DpoTrainer, PreferenceLoss

    kind = partial(DpoTrainer, preference=PreferenceLoss(kind="orpo"))
    trainer = make_trainer(checkpoint, output_dir, kind=kind, train_dataset=pairs(), eval_dataset=pairs())
    with pytest.raises(UsageError) as error:
        trainer.train(resume_from_checkpoint=str(resume))
    return str(error.value)


def of_another_run(checkpoint: Path, output_dir: Path, ckpt_format: str) -> dict[str, Any]:
    """A run from what another run wrote: the step in its own checkpoint, that it ends at when resumed, its log."""
    source = output_dir.with_name(f"of-another-run-{ckpt_format}")
    shutil.copytree(checkpoint, source)
    theirs = {"global_step": 99, "max_steps": 99, "best_metric": 0.5}
    for name in ("trainer_state.json", "training_args.json", "train_log.jsonl", "run.json"):
        (source / name).write_text(json.dumps(theirs))
    output_dir = output_dir.with_name(f"chained-{ckpt_format}")
    trained(source, output_dir, 2, None, ckpt_format=ckpt_format)
    state = json.loads((output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    arguments = json.loads((output_dir / "checkpoint-2" / "training_args.json").read_text())
    resumed = trained(source, output_dir, 4, "checkpoint-2", ckpt_format=ckpt_format)
    (output_dir / "train_log.jsonl").write_text("own")
    make_trainer(source, output_dir).save_model()
    log = (output_dir / "train_log.jsonl").read_text()
    return {
        "state": [state["global_step"], state["best_metric"]],
        "arguments": arguments.get("max_steps"),
        "resumed": resumed,
        "log": log,
    }


def lives(checkpoint: Path, output_dir: Path) -> dict[str, Any]:
    elsewhere = output_dir.with_name("elsewhere")
    found: dict[str, Any] = {"first": trained(checkpoint, output_dir, 6, None)}
    trained(checkpoint, elsewhere, 2, None)
    found["anew"] = refused(checkpoint, output_dir, None)
    found["kind"] = of_another_kind(checkpoint, output_dir.with_name("kind"), elsewhere / "checkpoint-2")
    found["from elsewhere"] = refused(checkpoint, output_dir, elsewhere / "checkpoint-2")
    found["replaced"] = trained(checkpoint, output_dir, 4, None, overwrite_output_dir=True)
    found["went on"] = trained(checkpoint, output_dir, 8, "checkpoint-4")
    found["went back"] = trained(checkpoint, output_dir, 7, "checkpoint-6", save_steps=1)
    found["went back again"] = trained(checkpoint, output_dir, 7, "checkpoint-6", save_steps=1)
    overwriting = {"save_steps": 1, "overwrite_output_dir": True}
    found["went back, overwriting"] = trained(checkpoint, output_dir, 7, "checkpoint-6", **overwriting)
    unsaved = {"save_strategy": "no", "overwrite_output_dir": True}
    found["went back, saving nothing"] = trained(checkpoint, output_dir, 7, "checkpoint-6", **unsaved)
    found["from elsewhere, overwriting"] = trained(
        checkpoint, output_dir, 3, str(elsewhere / "checkpoint-2"), **overwriting
    )
    for ckpt_format in ("mca", "torch_dist"):
        found[ckpt_format] = of_another_run(checkpoint, output_dir, ckpt_format)
    return found


def test_a_run_keeps_its_own_checkpoints_and_no_others(tmp_path):
    (found,) = run_ranks(1, lives, tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1), tmp_path / "a")
    assert found["first"] == ["4", "6"]
    for name in ("anew", "from elsewhere"):
        said, left = found[name]
        assert "holds the checkpoints of another run (checkpoint-4, checkpoint-6); continue that run" in said
        assert "overwrite_output_dir true" in said
        assert left == found["first"]
    assert "checkpoint-2 is of a pretrain or sft run, this is dpo; to use its model" in found["kind"]
    assert found["replaced"] == ["2", "4"], "not its own were removed, and those of the first run all"
    assert found["went on"] == ["6", "8"]
    assert found["went back"] == ["6", "7", "8.set-aside"]
    assert found["went back again"] == ["6", "7", "7.set-aside", "8.set-aside"], "one of the same step too"
    aside = ["7.set-aside", "7.set-aside-1", "8.set-aside"]
    assert found["went back, overwriting"] == ["6", "7", *aside], "none was deleted"
    aside = ["7.set-aside", "7.set-aside-1", "7.set-aside-2", "8.set-aside"]
    assert found["went back, saving nothing"] == ["6", *aside], (
        "auto would go on from the branch that was left"
    )
    assert found["from elsewhere, overwriting"] == ["3", *aside], "all of the other run were"
    for ckpt_format in ("mca", "torch_dist"):
        own = {"state": [2, None], "arguments": 2, "resumed": ["2", "4"], "log": "own"}
        assert found[ckpt_format] == own, "files of the run that made its model stand for its own"
