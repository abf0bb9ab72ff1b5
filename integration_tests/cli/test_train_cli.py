"""``mca-train`` from the shell: ranks, logs, a model that `transformers` reads, errors."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forked_cli
from cli_runs import as_flags, config, logs
from harness import run_ranks
from mca_models.checkpoint.side_files import side_files
from mca_train.checkpoint import integrity

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_pretrain_on_two_stages_and_back_to_hugging_face(folder):
    command = config(folder, "pretrain", eval_file=str(folder / "eval.jsonl"), save_hf_model=True)
    layout = ["pipeline_model_parallel_size", "virtual-pipeline-model-parallel-size"]
    done = forked_cli.launched(command + [word for key in layout for word in (f"--{key}", "2")], plots=True)
    assert done.returncode == 0, done.stderr
    assert "evaluation loss" in done.stdout
    found = logs(folder / "pretrain")
    losses = [log["loss"] for log in found if "loss" in log]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    (evaluated,) = [log["eval_loss"] for log in found if "eval_loss" in log]
    assert evaluated == pytest.approx(hugging_face_loss(folder, folder / "pretrain" / "hf"), rel=1e-4)
    assert (folder / "pretrain" / "mca_config.json").is_file()
    assert (folder / "pretrain" / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "pretrain" / "run.json").read_text())
    assert (record["task"], record["world_size"], len(record["plan"]["stages"])) == ("pretrain", 2, 2)
    reported = forked_cli.launched([*command[:3], "report", str(folder / "pretrain")])
    assert reported.returncode == 0, reported.stderr
    assert "planned memory" in (folder / "pretrain" / "report.html").read_text()
    of_model = {"chat_template.jinja", "generation_config.json", "special_tokens_map.json"}
    found_beside = {path.name for path in side_files(folder / "pretrain")}
    assert found_beside <= of_model | {"tokenizer.json", "tokenizer_config.json"}, (
        "what a run writes goes along"
    )


def hugging_face_loss(folder: Path, model_path: Path) -> float:
    """The loss of the exported model on the evaluation file, by `transformers` alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    rows = [json.loads(line)["text"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    tokens = [t for row in rows for t in [*tokenizer(row)["input_ids"], tokenizer.eos_token_id]]
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens), 64):
            block = torch.tensor([tokens[start : start + 64]])
            if block.shape[1] > 1:
                targets = block.shape[1] - 1
                total += model(input_ids=block, labels=block).loss.item() * targets
                count += targets
    return total / count


def test_the_best_model_is_the_one_that_is_written_and_whose_loss_is_printed(folder):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    first = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    of_model = {"eval_file": str(folder / "eval.jsonl"), "save_hf_model": True, "max_steps": 2}
    done = forked_cli.launched(config(folder, "best", **every, **first, **of_model))
    assert done.returncode == 0, done.stderr
    losses = [log["eval_loss"] for log in logs(folder / "best") if "eval_loss" in log]
    assert losses[0] > 1.01 * losses[1], "the best is not the last"
    (printed,) = re.findall(r"evaluation loss +([0-9.]+) \(the best, of step 1\)", done.stdout)
    written = hugging_face_loss(folder, folder / "best" / "hf")
    assert float(printed) == pytest.approx(written, rel=1e-5)  # six digits are printed


def test_sft_by_flags_alone_on_two_replicas_and_resume(folder):
    command = as_flags(
        config(folder, "sft", train_file=str(folder / "chat.jsonl"), nproc_per_node=2, save_strategy="steps")
    )
    at = command.index("--max_steps")
    without_steps = command[:at] + command[at + 2 :]
    first = [*without_steps, "--save_steps", "2", "--max_steps", "2", "--gradient_checkpointing", "true"]
    done = forked_cli.launched(first)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gradient_checkpointing: recomputing every layer") == 1
    done = forked_cli.launched([*command, "--save_steps", "2", "--resume_from_checkpoint", "auto"])
    assert done.returncode == 0, done.stderr
    steps = [log["step"] for log in logs(folder / "sft") if "loss" in log]
    assert steps == [1, 2, 3, 4]
    assert sorted(path.name for path in (folder / "sft").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]


@pytest.mark.cases(0, always=["--closed"])
@pytest.mark.parametrize("stdout,name", [("|", "unread"), ("/dev/full", "full"), ("-", "closed")])
def test_training_goes_on_where_nothing_can_be_printed(folder, stdout, name):
    saving = {"save_strategy": "steps", "save_steps": 2}
    command = config(folder, name, nproc_per_node=2, max_steps=2, **saving)
    done = forked_cli.launched(command, stdout)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("standard output cannot be written (No space left" in done.stderr) == (name == "full")
    assert [log["step"] for log in logs(folder / name) if "loss" in log] == [1, 2]
    assert [path.name for path in (folder / name).glob("checkpoint-*")] == ["checkpoint-2"]
    checked = run_ranks(1, integrity.faults, folder / name / "checkpoint-2", 0, 1)
    assert checked == [[]], "nothing is printed into its files"


def test_a_full_disk_is_one_line(folder, small_disk):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 20, "disable_tqdm": True}
    done = forked_cli.launched(config(folder, "filling", output_dir=str(small_disk / "run"), **saving))
    assert done.returncode == 1
    after = done.stderr.split("training 20 steps", 1)[1].splitlines()[1:]
    assert len(after) == 1, done.stderr
    assert re.search(
        rf"error: {small_disk}/run/checkpoint-\d+: cannot be written, the disk is full; make room and resume",
        after[0],
    )
    assert ".partial-" not in after[0] and "nothing half-written is left" in after[0]
    assert not list(small_disk.rglob("*.partial-*"))


def test_a_damaged_model_is_one_line(folder):
    weights = folder / "damaged" / "model.safetensors"
    weights.parent.mkdir()
    for file in (folder / "model").iterdir():
        data = file.read_bytes()
        (weights.parent / file.name).write_bytes(data[:-100] if file.name == weights.name else data)
    done = forked_cli.launched(
        config(folder, "broken", model_name_or_path=str(weights.parent), nproc_per_node=2)
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "model.safetensors" in errors[0]
    assert "Traceback" not in done.stderr


def signal_in_second_step(number: int) -> None:
    """Have rank 0 send a signal to this process, the launcher, once the first step is logged."""
    from mca_train.engine.engine import Engine

    launcher, step, steps = os.getpid(), Engine.optimizer_step, itertools.count(1)

    def signalling(self: Any) -> Any:
        if os.environ["RANK"] == "0" and next(steps) == 2:
            os.kill(launcher, number)
        return step(self)

    Engine.optimizer_step = signalling


def test_interrupting_ends_every_rank(folder):
    command = config(folder, "long", nproc_per_node=2, max_steps=100000)
    done = forked_cli.launched(command, before=lambda: signal_in_second_step(signal.SIGINT))
    assert done.returncode == 130


def waited_for(log: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not (log.exists() and log.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.qualify  # 17 s of imports; test_train_elastic.py has torchrun's agent start forks
def test_under_torchrun_two_ranks_train_and_sigterm_to_one_saves(folder):
    _, _, module, *words = config(folder, "torchrun", max_steps=100000, tensor_model_parallel_size=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", module, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    output = folder / "torchrun"
    waited_for(output / "train_log.jsonl", process)
    (rank, *_) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "stopped by SIGTERM after step" in stdout
    assert "continue with --resume_from_checkpoint auto" in stdout
    (saved,) = output.glob("checkpoint-*")
    assert f"checkpoint-{logs(output)[-2]['step']}" == saved.name
    assert not list(output.glob("*.partial-*"))


def test_sigterm_to_the_launcher_saves_and_resumes(folder):
    command = config(folder, "stopped", nproc_per_node=2, max_steps=100000)
    output = folder / "stopped"
    done = forked_cli.launched(command, before=lambda: signal_in_second_step(signal.SIGTERM))
    assert done.returncode == 0, done.stderr
    (saved,) = output.glob("checkpoint-*")
    assert saved.name in done.stdout
    step = int(saved.name.split("-")[1])
    done = forked_cli.launched([*command, "--resume_from_checkpoint", "auto", "--max_steps", str(step + 2)])
    assert done.returncode == 0, done.stderr
    steps = [log["step"] for log in logs(output) if "loss" in log]
    assert steps == list(range(1, step + 3))


def break_second_rank() -> None:
    """Has rank 1 raise at its first step."""
    from mca_train.engine.engine import Engine

    step = Engine.optimizer_step

    def broken(self: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise RuntimeError("broken here")
        return step(self)

    Engine.optimizer_step = broken


def test_a_failing_rank_ends_all_with_its_traceback_once(folder):
    command = config(folder, "failing", nproc_per_node=2, max_steps=100000)
    done = forked_cli.launched(command, before=break_second_rank)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 failed:" in done.stderr
    assert "RuntimeError: broken here" in done.stderr
