"""Runs of ``mca-train`` on rows with media, and the same steps in transformers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import forked_cli

STEPS, RATE = 3, 1e-3
Row = dict[str, torch.Tensor]
"""transformers' inputs for one row, with labels."""
LAYOUTS = {
    "one": (),
    "tp2sp": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "cp2packed": (
        *("--context_parallel_size", "2", "--sequence_packing", "true", "--seq_length", "512"),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"),
    ),
    "pp2": ("--pipeline_model_parallel_size", "2"),
}


def judged_answers(said: str) -> dict[str, str]:
    """Return a better and a worse answer."""
    return {"chosen": said, "rejected": f"not {said} at all"}


def run_training(
    folder: Path, name: str, *words: str, kind: str = "sft", seq_length: int = 256
) -> list[dict[str, float]]:
    """Train the model of ``folder`` on its rows of ``kind``; return the logged steps."""
    run = {
        "model_name_or_path": str(folder / "model"),
        "train_file": str(folder / f"{kind}.jsonl"),
        "output_dir": str(folder / name),
        "seq_length": seq_length,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": RATE,
        "freeze": [],
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_hf_model": True,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(run))
    command = [sys.executable, "-m", "mca_train", kind, str(folder / f"{name}.yaml"), *words]
    done = forked_cli.launched(command)
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "train_log.jsonl").read_text().splitlines()
    return [log for line in lines if "loss" in (log := json.loads(line))]


def load_model(path: Path) -> Any:
    """Return transformers' model with plain attention."""
    return transformers.AutoModelForMultimodalLM.from_pretrained(path, attn_implementation="eager")


def answer_log_prob(model: Any, row: Row) -> torch.Tensor:
    """The log-probability of the answer in a row."""
    labels = row["labels"][0, 1:]
    logits = model(**{k: v for k, v in row.items() if k != "labels"}).logits[0, :-1]
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def adamw_losses(model: Any, loss: Callable[[], torch.Tensor]) -> list[float]:
    """The losses of steps that transformers makes in one process."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = loss()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses
