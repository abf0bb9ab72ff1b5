"""Signals of a run: speed and use of the devices, gradients that are no numbers, and being told to stop."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import RanksFailed, run_ranks
from test_train_layouts import PP
from train_cases import history, make_trainer, quietly, samples, sparse_checkpoint, tiny_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def stop_at(step: int, rank: int) -> Any:
    """A callback that sends SIGTERM to the process of ``rank`` in the middle of ``step``."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == step and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stop()


def stopped_in_an_evaluation(
    checkpoint: Path, output_dir: Path, rank: int, step: int, **changes: Any
) -> None:
    from transformers import TrainerCallback

    from mca_train.run.last_evaluation import LastEvaluation

    asked: list[int] = []

    class Stop(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            asked.append(state.global_step)
            if len(asked) == 1 and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(resume: str | None, callback: Any) -> Any:
        trainer = make_trainer(checkpoint, output_dir, eval_dataset=samples(40, seed=9), **changes)
        trainer.callback_handler.callbacks[:0] = [LastEvaluation(trainer), callback]
        quietly(lambda: trainer.train(resume_from_checkpoint=resume))
        return trainer

    first = run(None, Stop())
    assert first.watch.stopped
    assert len(asked) < 10, "of 20 steps"
    assert not history(first, "eval_loss")
    names = [path.name for path in output_dir.glob("checkpoint-*")]
    assert names == [f"checkpoint-{step}"], "though save_strategy is no"
    second = run("auto", TrainerCallback())
    assert not second.watch.stopped
    found = history(second, "eval_loss")
    assert (len(found), found[0]) == (3 - step, quietly(first.evaluate)["eval_loss"])


def stopped_and_resumed(checkpoint: Path, output_dir: Path, rank: int, **changes: Any) -> dict[str, Any]:
    from mca_train.trainer import stop_signal

    stop_signal._EVERY = 0.0  # as with steps of more than a second
    straight = make_trainer(checkpoint, output_dir / "straight", **changes)
    quietly(straight.train)
    first = make_trainer(checkpoint, output_dir, **changes)
    first.add_callback(stop_at(4, rank))
    quietly(first.train)
    second = make_trainer(checkpoint, output_dir, **changes)
    quietly(lambda: second.train(resume_from_checkpoint="auto"))
    for step, strategy in ((2, {}), (1, {"eval_strategy": "steps", "eval_steps": 1})):
        output = output_dir / f"evaluated-{step}"
        stopped_in_an_evaluation(checkpoint, output, rank, step, **changes | {"max_steps": 2} | strategy)
    return {
        "stopped": (first.watch.stopped, first.state.global_step, second.watch.stopped),
        "straight": history(straight, "loss"),
        "resumed": history(second, "loss"),
        "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "patience": patience(first),
    }


def patience(trainer: Any) -> set[float]:
    """Seconds that ranks wait for each other, in every group that they wait in."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    watch = trainer.watch.signal._groups
    groups = [
        dist.group.WORLD,
        state.get_tensor_model_parallel_group(),
        state.get_data_parallel_group(),
        *watch,
    ]
    return {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups if group
    }


@pytest.mark.parametrize(
    ("size", "changes"),
    [pytest.param(1, {}, marks=pytest.mark.wide), (2, PP)],  # one rank: test_train_life.py interrupts it too
)
def test_sigterm_to_any_rank_saves_and_ends_at_one_step(size, changes, checkpoint, tmp_path):
    found = run_ranks(size, stopped_and_resumed, checkpoint, tmp_path, size - 1, max_steps=8, **changes)
    for rank in found:
        assert rank["stopped"] in ((True, 4, False), (True, 5, False))
        assert rank["stopped"] == found[0]["stopped"]
        assert rank["resumed"] == rank["straight"]
        assert rank["handler"], "what listened before listens again"
        assert rank["patience"] == {120.0}, "the harness's, as with ddp_timeout"


def stopped_twice(checkpoint: Path, output_dir: Path) -> None:
    import time

    trainer = make_trainer(checkpoint, output_dir)

    def slow(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    trainer._save_checkpoint = trainer.training_step = slow
    trainer.train()


def test_a_second_sigterm_ends_at_once(checkpoint, tmp_path):
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(1, stopped_twice, checkpoint, tmp_path, timeout=25)


def poisoned(checkpoint: Path, output_dir: Path, **changes: Any) -> str:
    """The error of a run in which one gradient turns to nan."""
    import torch

    from mca_config.errors import McaError

    trainer = make_trainer(checkpoint, output_dir, save_strategy="steps", save_steps=1, **changes)
    step = trainer.training_step

    def poison(batch: Any) -> Any:
        if trainer.state.global_step == 2:
            held = {item.param.mca_name(): tensor for item, tensor in trainer.model.held()}
            name = "decoder.layers.3.mlp.linear_fc2.weight"
            if name in held:
                held[name].register_hook(lambda gradient: gradient * torch.nan)
        return step(batch)

    trainer.training_step = poison
    try:
        quietly(trainer.train)
    except McaError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("size", "changes"), [pytest.param(1, {}, marks=pytest.mark.wide), (2, PP | {"bf16": True})]
)
def test_a_gradient_that_is_no_number_is_named_and_not_saved(size, changes, checkpoint, tmp_path):
    for message in run_ranks(size, poisoned, checkpoint, tmp_path, **changes):
        assert message.startswith("step 3: the gradient norm is nan")
        assert f"decoder.layers.3.mlp.linear_fc2.weight (rank {size - 1}: nan)" in message
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def reported(checkpoint: Path, output_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    trainer = make_trainer(checkpoint, output_dir, max_steps=3, **changes)
    quietly(trainer.train)
    found: list[dict[str, Any]] = trainer.state.log_history
    return found


def test_speed_memory_and_bubble_are_logged_everywhere(checkpoint, tmp_path):
    logs = run_ranks(2, reported, checkpoint, tmp_path, report_to="tensorboard", peak_tflops=0.5, **PP)[0]
    names = {"tokens_per_second", "samples_per_second", "step_time", "model_tflops", "mfu", "peak_memory_gib"}
    assert names <= logs[0].keys()
    assert logs[0]["pipeline_bubble"] == pytest.approx(1 / 9, rel=1e-3)  # (pp - 1) / (m + pp - 1)
    assert logs[0]["mfu"] == pytest.approx(logs[0]["model_tflops"] / (0.5 * 2), rel=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    assert names <= lines[0].keys()
    events = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", tmp_path))
    assert tensorboard_tags(events) >= {f"train/{name}" for name in names | {"pipeline_bubble", "loss"}}


def tensorboard_tags(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: set[str] = set()
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        tags |= set(events.Tags()["scalars"]) | set(events.Tags()["tensors"])
    return tags


def test_without_a_known_peak_there_is_no_mfu(checkpoint, tmp_path):
    (logs,) = run_ranks(1, reported, checkpoint, tmp_path)
    assert "mfu" not in logs[0]
    assert "pipeline_bubble" not in logs[0]
    assert logs[0]["model_tflops"] > 0


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

    trainer = make_trainer(checkpoint, output_dir, max_steps=3, **changes)
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
    model = sparse_checkpoint(tmp_path / "model")
    for scales, skipped in run_ranks(2, overflowing_once, model, tmp_path / "out"):
        assert scales == [128.0, 128.0]
        assert skipped == [0, 1, 0]


def resumed_before_the_first_update(
    checkpoint: Path,
    output_dir: Path,
    cases: Sequence[dict[str, Any]] = ({}, {"use_distributed_optimizer": True}),
) -> list[tuple[Any, Any]]:
    """Logs of a run whose first steps are skipped, and of those that go on from its first checkpoint.

    These are a new trainer, and the one that has made updates since.
    """
    found = []
    for number, changes in enumerate(cases):
        run = {"fp16": True, "initial_loss_scale": 2.0**14, "hysteresis": 1, "loss_scale_window": 9}
        run |= {"max_steps": 6} | changes
        folder = output_dir / str(number)
        straight = make_trainer(checkpoint, folder, save_strategy="steps", save_steps=1, **run)
        quietly(straight.train)
        keys = ("loss", "grad_norm", "loss_scale", "skipped_steps")
        curve = {key: history(straight, key) for key in keys}
        straight.args.save_strategy = "no"
        for resumed in (make_trainer(checkpoint, folder, **run), straight):
            quietly(partial(resumed.train, resume_from_checkpoint=str(folder / "checkpoint-1")))
            found += [(curve, {key: history(resumed, key) for key in keys})]
    return found


@pytest.mark.wide
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


HOPELESS: dict[str, dict[str, Any]] = {
    "fixed scale": {"fp16": True, "loss_scale": 1e9},
    "large steps": {"fp16": True, "learning_rate": 1e5, "initial_loss_scale": 16.0},
    "large steps in the end": {
        "fp16": True,
        "learning_rate": 1e5,
        "max_steps": 1,
        "initial_loss_scale": 16.0,
    },
}


def hopeless(checkpoint: Path, output_dir: Path, **layout: Any) -> dict[str, tuple[str, list[str]]]:
    """What runs that cannot go on say, and the checkpoints that they leave."""
    from mca_config.errors import McaError

    common = {"max_steps": 30, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1}
    saving = {"save_strategy": "steps", "save_steps": 4, "warmup_steps": 0}
    found = {}
    for name, changes in HOPELESS.items():
        folder = output_dir / name
        trainer = make_trainer(checkpoint, folder, **common | saving | layout | changes)
        try:
            quietly(trainer.train)
            told = "no error"
        except McaError as error:
            told = str(error)
        found[name] = told, sorted(path.name for path in folder.glob("checkpoint-*"))
    return found


def broken_adapter(model: Path, adapter: Path, output_dir: Path) -> str:
    """What a run says whose last step has made an adapter infinite."""
    from mca_config.errors import McaError

    changes = HOPELESS["large steps in the end"] | {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(
        model, output_dir, adapter=adapter, warmup_steps=0, lr_scheduler_type="constant", **changes
    )
    with pytest.raises(McaError) as error:
        quietly(trainer.train)
    return str(error.value)


def test_an_adapter_that_is_no_number_is_named_and_not_saved(checkpoint, tmp_path):
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "lora"
    )
    (told,) = run_ranks(1, broken_adapter, checkpoint, tmp_path / "lora", tmp_path / "run")
    assert "the model is broken and is not saved; parameters that are not finite: " in told
    assert ".lora_B.q_proj.weight (rank 0: " in told
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_run_that_cannot_go_on_ends_before_it_saves_what_is_useless(checkpoint, tmp_path):
    for found in run_ranks(2, hopeless, checkpoint, tmp_path, **PP):
        told, left = found["fixed scale"]
        assert "10 steps in a row were skipped" in told
        assert "loss_scale is 1e+09: lower it" in told
        assert left == ["checkpoint-4", "checkpoint-8"]
        for name in ("large steps", "large steps in the end"):
            told, left = found[name]
            assert "the model is broken and is not saved; parameters that are not finite: " in told
            assert left == []
