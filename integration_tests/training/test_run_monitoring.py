"""A run logs its speed and memory, stops on SIGTERM, and reports a gradient that is NaN."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from harness import RanksFailed, run_ranks
from interruptions import stop_at
from train_cases import history, make_trainer, quietly, samples, tiny_checkpoint
from train_settings import PP

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def stopped_in_an_evaluation(
    checkpoint: Path, output_dir: Path, rank: int, step: int, **changes: Any
) -> None:
    from transformers import TrainerCallback

    from mca_train.run.train import LastEvaluation

    asked: list[int] = []

    class Stop(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            asked.append(state.global_step)
            if len(asked) == 1 and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(resume: str | None, callback: Any) -> Any:
        trainer = make_trainer(checkpoint, output_dir, eval_dataset=samples(12, seed=9), **changes)
        trainer.callback_handler.callbacks[:0] = [LastEvaluation(trainer), callback]
        quietly(lambda: trainer.train(resume_from_checkpoint=resume))
        return trainer

    first = run(None, Stop())
    assert first.watch.stopped
    assert len(asked) < 6, "of 6 steps"
    assert not history(first, "eval_loss")
    names = [path.name for path in output_dir.glob("checkpoint-*")]
    assert names == [f"checkpoint-{step}"], "though save_strategy is no"
    second = run("auto", TrainerCallback())
    assert not second.watch.stopped
    found = history(second, "eval_loss")
    assert (len(found), found[0]) == (3 - step, quietly(first.evaluate)["eval_loss"])


def stopped_and_resumed(checkpoint: Path, output_dir: Path, rank: int, **changes: Any) -> dict[str, Any]:

    straight = make_trainer(checkpoint, output_dir / "straight", **changes)
    quietly(straight.train)
    first = make_trainer(checkpoint, output_dir, **changes)
    first.add_callback(stop_at(3, rank))
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
        "patience": patience(),
    }


def patience() -> set[float]:
    """Seconds that ranks wait for each other, in every group that they wait in."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    groups = [
        dist.group.WORLD,
        state.get_tensor_model_parallel_group(),
        state.get_data_parallel_group(),
    ]
    return {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups if group
    }


@pytest.mark.cases(0, always=["pp2"])  # one rank: test_interrupted_runs.py interrupts it too
@pytest.mark.parametrize(("size", "changes"), [(1, {}), (2, PP)], ids=["one", "pp2"])
def test_sigterm_to_any_rank_saves_and_ends_at_one_step(size, changes, checkpoint, tmp_path):
    run = {"max_steps": 5, "gradient_accumulation_steps": 2}
    found = run_ranks(size, stopped_and_resumed, checkpoint, tmp_path, size - 1, **run, **changes)
    for rank in found:
        assert rank["stopped"] in ((True, 3, False), (True, 4, False))
        assert rank["stopped"] == found[0]["stopped"]
        assert rank["resumed"] == rank["straight"]
        assert rank["handler"], "what listened before listens again"
        assert rank["patience"] == {120.0}, "the harness's, as with ddp_timeout"


def stopped_twice(checkpoint: Path, output_dir: Path) -> None:
    import time

    from mca_train.trainer import sigterm

    trainer, now = make_trainer(checkpoint, output_dir), [0.0]

    def slow(*_: Any) -> None:
        with patch.object(sigterm, "time", SimpleNamespace(monotonic=lambda: now[0])):
            for now[0] in (0.1, 1.0):
                os.kill(os.getpid(), signal.SIGTERM)
            (output_dir / "goes on").touch()
            now[0] = 1.2
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    trainer.training_step = slow
    trainer.train()


def test_a_second_sigterm_ends_at_once(checkpoint, tmp_path):
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(1, stopped_twice, checkpoint, tmp_path, timeout=25)
    assert (tmp_path / "goes on").exists(), "within a second it is the same signal"


def poisoned(checkpoint: Path, output_dir: Path, **changes: Any) -> str:
    """The error of a run in which one gradient turns to nan."""
    import torch

    from mca_config.errors import McaError

    trainer = make_trainer(checkpoint, output_dir, save_strategy="steps", save_steps=1, **changes)
    step = trainer.training_step

    def poison(batch: Any) -> Any:
        if trainer.state.global_step == 2:
            held = {item.param.mca_name(): tensor for item, tensor in trainer.model.local_params()}
            name = "decoder.layers.1.mlp.linear_fc2.weight"
            if name in held:
                held[name].register_hook(lambda gradient: gradient * torch.nan)
        return step(batch)

    trainer.training_step = poison
    try:
        quietly(trainer.train)
    except McaError as error:
        return str(error)
    return "no error"


@pytest.mark.cases(0, always=["pp2-bf16"])
@pytest.mark.parametrize(("size", "changes"), [(1, {}), (2, PP | {"bf16": True})], ids=["one", "pp2-bf16"])
def test_a_gradient_that_is_nan_is_named_and_not_saved(size, changes, checkpoint, tmp_path):
    for message in run_ranks(size, poisoned, checkpoint, tmp_path, **changes):
        assert message.startswith("step 3: the gradient norm is nan")
        assert f"decoder.layers.1.mlp.linear_fc2.weight (rank {size - 1}: nan)" in message
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
    assert logs[0]["pipeline_bubble"] == pytest.approx(1 / 5, rel=1e-3)  # (pp - 1) / (m + pp - 1)
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
    """Return the errors of runs that cannot continue, and their checkpoints."""
    from mca_config.errors import McaError

    common = {"max_steps": 30, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1}
    saving = {"save_strategy": "steps", "save_steps": 4, "warmup_steps": 0}
    found = {}
    for name, changes in HOPELESS.items():
        folder = output_dir / name
        trainer = make_trainer(checkpoint, folder, **common | saving | layout | changes)
        try:
            quietly(trainer.train)
            printed = "no error"
        except McaError as error:
            printed = str(error)
        found[name] = printed, sorted(path.name for path in folder.glob("checkpoint-*"))
    return found


def broken_adapter(model: Path, adapter: Path, output_dir: Path) -> str:
    """Return the error of a run whose last step has made an adapter infinite."""
    from mca_config.errors import McaError

    changes = HOPELESS["large steps in the end"] | {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(
        model, output_dir, adapter=adapter, warmup_steps=0, lr_scheduler_type="constant", **changes
    )
    with pytest.raises(McaError) as error:
        quietly(trainer.train)
    return str(error.value)


def test_an_adapter_that_is_nan_is_named_and_not_saved(checkpoint, tmp_path):
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "lora"
    )
    (printed,) = run_ranks(1, broken_adapter, checkpoint, tmp_path / "lora", tmp_path / "run")
    assert "the model has parameters that are not finite and is not saved: " in printed
    assert ".lora_B.q_proj.weight (rank 0: " in printed
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_run_that_cannot_go_on_ends_before_it_saves_what_is_useless(checkpoint, tmp_path):
    for found in run_ranks(2, hopeless, checkpoint, tmp_path, **PP):
        printed, left = found["fixed scale"]
        assert "10 steps in a row were skipped" in printed
        assert "loss_scale is 1e+09: lower it" in printed
        assert left == ["checkpoint-4", "checkpoint-8"]
        for name in ("large steps", "large steps in the end"):
            printed, left = found[name]
            assert "the model has parameters that are not finite and is not saved: " in printed
            assert left == []
