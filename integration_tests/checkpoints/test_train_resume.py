"""A run that is stopped and resumed is the run that was not; checkpoints are whole."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import RanksFailed, prepare_parent, run_ranks
from train_cases import VOCAB, history, make_trainer, quietly, stop_and_resume, tiny_checkpoint, tokens
from train_settings import ASYNC, OVERLAP, PP, TP, VPP, ZERO

pytestmark = pytest.mark.ranks

SMALL = {
    "gradient_accumulation_steps": 2,
    "count": 7,
    "max_steps": 5,
    "at": 3,
}  # of which the fourth is short
RATES = {"decoupled_lr": 1e-3, "decoupled_min_lr": 2e-4, "min_lr": 1e-3}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
LAYOUTS = {
    "one-rank": (1, {}),
    "one-rank-bf16": (1, {"bf16": True}),
    "tp2": (2, TP),
    "dp2-distributed-optimizer": (2, ZERO),
    "dp2-pp2-vpp2-overlap": (4, OVERLAP | VPP),
    "tp2-rates-of-their-own": (2, TP | RATES),
    "dp2-pp2-distributed-optimizer-rates-of-their-own": (4, PP | ZERO | RATES),
    "the-same-rate-as-one-of-its-own": (1, {"decoupled_lr": 5e-3}),
    "torch-dist": (1, {"ckpt_format": "torch_dist"}),
    "dp2-distributed-optimizer-in-background": (2, ZERO | ASYNC),
    "tp2-dropout": (2, TP | DROPOUT),
    "tp2-dropout-rates-of-their-own": (2, TP | DROPOUT | RATES),
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of four layers, for virtual stages."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.cases(0, always=["one-rank-bf16", "torch-dist", "tp2-dropout-rates-of-their-own"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_changes_no_bit(name, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    for found in run_ranks(size, stop_and_resume, checkpoint, tmp_path, **(changes | SMALL)):
        assert found["resumed"] == found["straight"]
        assert found["state"] == {"steps": 5, "equal_weights": True}


@pytest.mark.qualify
def test_layers_that_differ_in_shape_resume(tmp_path):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    beside = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
    }
    wide = {
        "use_double_wide_mlp": True,
        "global_head_dim": 24,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    }
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = tiny_checkpoint(
        tmp_path / "model", Gemma4TextConfig, Gemma4ForCausalLM, **beside, **wide, **kinds
    )
    for found in run_ranks(2, stop_and_resume, model, tmp_path / "run", **(ZERO | SMALL)):
        assert found["resumed"] == found["straight"]
        assert found["state"] == {"steps": 5, "equal_weights": True}


def rotate(checkpoint: Path, output_dir: Path) -> dict[str, Any]:
    trainer = make_trainer(
        checkpoint,
        output_dir,
        max_steps=3,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.01,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it is not the last
        bf16=True,
    )
    quietly(trainer.train)
    found = {"eval": history(trainer, "eval_loss"), "best": trainer.state.best_model_checkpoint}
    found["after"] = quietly(trainer.evaluate)["eval_loss"]
    still = {"learning_rate": 0.0, "max_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    for name, value in (
        still | {"output_dir": f"{output_dir}-still", "load_best_model_at_end": False}
    ).items():
        setattr(trainer.args, name, value)
    quietly(trainer.train)
    return found | {"trained on": quietly(trainer.evaluate)["eval_loss"]}


def test_the_best_checkpoint_survives_and_is_loaded(checkpoint, tmp_path):
    found = run_ranks(2, rotate, checkpoint, tmp_path)[0]
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert "checkpoint-3" in names
    assert Path(found["best"]).name in names
    assert len(names) <= 2
    assert found["after"] == pytest.approx(max(found["eval"]), rel=1e-6)
    assert found["trained on"] == found["after"] > found["eval"][-1]


def test_the_last_complete_checkpoint_is_found(checkpoint, tmp_path):
    from mca_config.errors import McaError
    from mca_train.checkpoint.output_files import checkpoints, resolve

    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-12.partial-ab"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-11":
            (tmp_path / name / "trainer_state.json").write_text("{}")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert resolve(True, tmp_path) == resolve("auto", tmp_path) == tmp_path / "checkpoint-10"
    assert resolve("auto", tmp_path / "none") is None
    with pytest.raises(McaError, match="no complete checkpoint"):
        resolve(True, tmp_path / "none")
    with pytest.raises(McaError, match=r"has no trainer_state\.json"):
        resolve(str(tmp_path / "checkpoint-11"), tmp_path)
    with pytest.raises(
        McaError, match=r"is the output_dir of a run; set a checkpoint in it \(checkpoint-10\)"
    ):
        resolve(str(tmp_path), tmp_path)
    with pytest.raises(McaError, match="is a file, not a directory"):
        resolve(str(tmp_path / "checkpoint-9" / "trainer_state.json"), tmp_path)


def test_the_best_checkpoint_is_where_the_run_is(tmp_path):
    """Not where it was: runs are moved, copied and given by other paths."""
    from transformers import TrainerState

    from mca_train.checkpoint.directory import checkpoints_to_delete, locate_best

    run = tmp_path / "run"
    for step in (2, 4, 6):
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    state = TrainerState(best_model_checkpoint="before/run/checkpoint-2", best_metric=1.5, best_global_step=2)
    locate_best(state, run / "checkpoint-6")
    assert state.best_model_checkpoint == str(run / "checkpoint-2")
    assert checkpoints_to_delete(run, 1, state.best_model_checkpoint) == [run / "checkpoint-4"]
    elsewhere = TrainerState(best_model_checkpoint=str(run / "checkpoint-2"), best_metric=1.5)
    locate_best(elsewhere, tmp_path / "other" / "checkpoint-9")
    assert elsewhere.best_model_checkpoint == str(run / "checkpoint-2")
    gone = TrainerState(best_model_checkpoint="before/checkpoint-1", best_metric=1.5, best_global_step=1)
    locate_best(gone, run / "checkpoint-6")
    assert (gone.best_model_checkpoint, gone.best_metric, gone.best_global_step) == (None, None, None)


def by_another_metric(checkpoint: Path, output_dir: Path) -> list[Any]:
    """The best value and the patience that are gone on with, with the same metric and in the other direction."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    from mca_train.checkpoint import directory

    def run(steps: int, *, greater: bool) -> tuple[Any, Any]:
        early = EarlyStoppingCallback(9)
        begun: list[Any] = []

        class Look(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                kept = (state.best_metric, state.best_model_checkpoint, state.best_global_step)
                begun.append((*kept, early.early_stopping_patience_counter))

        trainer = make_trainer(
            checkpoint,
            output_dir,
            max_steps=steps,
            gradient_accumulation_steps=1,
            learning_rate=0.0,  # the first checkpoint is the best one
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            metric_for_best_model="eval_loss",
            greater_is_better=greater,
            callbacks=[early, Look()],
        )
        quietly(lambda: trainer.train(resume_from_checkpoint="auto"))
        return begun[0], history(trainer, "eval_loss")

    run(2, greater=True)
    with patch.object(directory.logger, "warning") as warning:
        same, losses = run(3, greater=True)
        assert not warning.called
        other, _ = run(4, greater=False)
    (reported,) = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return [(same[0] == losses[0], *same[1:]), other, reported]


@pytest.mark.qualify
def test_the_best_model_by_another_metric_is_none(checkpoint, tmp_path):
    ((same, other, reported),) = run_ranks(1, by_another_metric, checkpoint, tmp_path)
    assert same == (True, str(tmp_path / "checkpoint-1"), 1, 1)
    assert other == (None, None, None, 0)
    assert "by eval_loss (greater is better), this run's by eval_loss (smaller is better)" in reported


def test_a_checkpoint_is_deleted_while_training_goes_on(tmp_path, monkeypatch):
    """Renamed at once, so that nobody takes half of one for whole; gone before the next is written."""
    import shutil
    import threading

    from mca_train.checkpoint.output_files import checkpoints
    from mca_train.checkpoint.writer import CheckpointWriter

    folder, go = tmp_path / "checkpoint-1", threading.Event()
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *words, **how: go.wait(60) and remove(*words, **how))
    writer = CheckpointWriter(in_background=False)
    writer.delete(folder)
    assert checkpoints(tmp_path) == []
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("checkpoint-1.partial-")
    go.set()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_for_every_file(tmp_path):
    import errno

    from mca_config.errors import McaError, RankFailed
    from mca_config.files import write_error
    from mca_train.checkpoint.writer import name_errors

    prepare_parent()

    def reported(error: Exception) -> str:
        with pytest.raises(McaError) as found, name_errors(tmp_path):
            raise error
        return str(found.value)

    full = reported(OSError(errno.ENOSPC, "No space left on device"))
    assert full.startswith(f"{tmp_path}: cannot be written, the disk is full; make room and resume")
    refused = write_error(tmp_path / "x", OSError(errno.ENOSPC, "No space left on device"))
    assert reported(refused) == full and reported(RankFailed(1, refused)) == full
    assert reported(RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file data/3")) == full
    large = write_error(tmp_path / "x", OSError(errno.ENOSPC, "No space left on device"), 1 << 50)
    room = r"\(x needs 1,125,899,906,842,624 bytes, [\d,]+ bytes are free; nothing half-written is left\)$"
    assert full.endswith("(nothing half-written is left)") and re.search(room, reported(RankFailed(1, large)))
    assert reported(McaError("rank 1 fell")) == f"{tmp_path}: cannot be written: rank 1 fell"
    around = McaError("rank 0 fell")
    around.__cause__ = RankFailed(0, around)  # as `run_on_first_rank_unwrapped` raises it
    assert reported(around) == f"{tmp_path}: cannot be written: rank 0 fell"


def fail_while_saving(checkpoint: Path, output_dir: Path) -> None:
    import torch.distributed as dist

    from mca_train.checkpoint import training_state

    saving = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    trainer = make_trainer(checkpoint, output_dir, max_steps=2, **saving)
    save = training_state.save_rng

    def save_once(*where: Any) -> None:
        if trainer.state.global_step == 2 and dist.get_rank() == 1:
            raise OSError("the cable is loose")
        save(*where)

    training_state.save_rng = save_once
    quietly(trainer.train)


def test_a_failed_save_leaves_the_checkpoint_before(checkpoint, tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, fail_while_saving, checkpoint, tmp_path)
    reported = "checkpoint-2: cannot be written: rank 1 could not save: OSError: the cable is loose"
    assert str(failed.value).partition("\n")[2].count(reported) == 2, (
        "every rank says which one failed, and why"
    )
    from mca_train.checkpoint.output_files import checkpoints

    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]


EP = {"expert_model_parallel_size": 2}
AS_HF = {
    "tp2-in-background": (2, "dense", TP | ASYNC),
    "pp2-vpp2-only-model": (2, "deep", VPP | {"save_only_model": True}),
    "ep2-distributed-optimizer": (2, "experts", EP | ZERO),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    from reference import make_reference

    return make_reference("qwen3_moe", tmp_path_factory.mktemp("experts")).path


def ids() -> Any:
    import torch

    return torch.arange(48).reshape(2, 24)


def saved_as_hf(checkpoint: Path, output_dir: Path, **changes: Any) -> Any:
    """Logits of the model after two steps, of which the second left a checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_hf_model": True, "warmup_steps": 0}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2}
    if "expert_model_parallel_size" in changes:
        settings["train_dataset"] = tokens(8)
    trainer = make_trainer(checkpoint, output_dir, **settings | saving | changes | {"learning_rate": 0.02})
    quietly(trainer.train)
    return trainer.model.logits(ids())


@pytest.mark.cases(0, always=[name for name in AS_HF if name != "ep2-distributed-optimizer"])
@pytest.mark.parametrize("name", AS_HF)
def test_transformers_loads_what_a_checkpoint_holds_for_it(name, checkpoint, deep, experts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    size, kind, changes = AS_HF[name]
    start = {"dense": checkpoint, "deep": deep, "experts": experts}[kind]
    logits = run_ranks(size, saved_as_hf, start, tmp_path, **changes)[0]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder)(ids(), use_cache=False).logits
            for folder in (start, tmp_path / "checkpoint-2" / "hf")
        )
    assert (after - before).abs().max() > 0.01, "trained"
    torch.testing.assert_close(logits, after, rtol=1e-4, atol=2e-5)


def logged(checkpoint: Path, output_dir: Path) -> None:
    settings = {"max_steps": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(checkpoint, output_dir, save_strategy="steps", save_steps=2, **settings)
    quietly(trainer.train)
    again = make_trainer(checkpoint, output_dir, save_strategy="no", **settings)
    quietly(lambda: again.train(resume_from_checkpoint=str(output_dir / "checkpoint-2")))


def test_the_log_has_every_step_once_also_after_resuming(checkpoint, tmp_path):
    run_ranks(1, logged, checkpoint, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
