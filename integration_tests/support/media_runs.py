"""Runs of ``mca-train`` on rows with media, and the same steps in transformers."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forked_cli

STEPS, RATE = 2, 1e-3
LEARNED = 0.025 * (STEPS - 1)
"""Least change of the loss: a run that does not train, or trains little, does not compare the steps."""
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


def files_by_kind(
    rows: Iterable[tuple[str, str, Mapping[str, list[str]]]], good: Iterable[bool]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each kind of run.

    Args:
        rows: Question, answer and files of each row.
        good: The label of each answer.
    """
    found: dict[str, list[dict[str, Any]]] = {"sft": [], "dpo": [], "kto": []}
    for (asked, said, files), label in zip(rows, good, strict=True):
        prompt = {"prompt": [{"role": "user", "content": asked}], **files}
        sides = {
            side: [{"role": "assistant", "content": answer}] for side, answer in judged_answers(said).items()
        }
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        found["sft"].append({"messages": turns, **files})
        found["dpo"].append({**prompt, **sides})
        found["kto"].append({**prompt, "completion": sides["chosen"], "label": label})
    return found


def run_training(
    folder: Path, name: str, *words: str, kind: str = "sft", seq_length: int = 256
) -> list[dict[str, float]]:
    """Train the model of ``folder`` on its rows of ``kind``; return the logged steps.

    What is printed is in the file ``{name}.out`` of ``folder``.
    """
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
    (folder / f"{name}.out").write_text(done.stdout + done.stderr)
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


def require_judged_as_in_transformers(
    folder: Path,
    layout: str,
    load: Callable[[], Any],
    inputs: Callable[[str, Sequence[str], str], Row],
    rows: Sequence[tuple[str, tuple[str, ...], str]],
    good: Sequence[bool],
) -> None:
    """Compare the losses of DPO and of KTO on rows with media with those of transformers.

    Args:
        folder: The checkpoint and the rows.
        layout: A key of ``LAYOUTS``.
        load: Returns a new copy of transformers' model.
        inputs: Returns transformers' inputs from the question, the media and the answer of a row.
        rows: Question, media and answer of each row.
        good: The label of each answer, for KTO.
    """
    words = (*LAYOUTS[layout], "--save_hf_model", "false")
    model, frozen = load(), load()

    def gained(row: Row) -> torch.Tensor:
        with torch.no_grad():
            before = answer_log_prob(frozen, row)
        return answer_log_prob(model, row) - before

    pairs = [[inputs(*row[:2], answer) for answer in judged_answers(row[2]).values()] for row in rows]

    def compared() -> torch.Tensor:
        margins = torch.stack([gained(better) - gained(worse) for better, worse in pairs])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    logs = run_training(folder, f"dpo-{layout}", *words, kind="dpo")
    assert [log["loss"] for log in logs] == pytest.approx(adamw_losses(model, compared), rel=1e-5)

    model = load()
    own = [inputs(*row) for row in rows]
    others = [inputs(*row[:2], rows[number - 1][2]) for number, row in enumerate(rows)]
    signs = torch.tensor(good).float() * 2 - 1

    def judged() -> torch.Tensor:
        with torch.no_grad():
            kl = torch.stack([gained(row) for row in others]).mean().clamp(min=0)
        away = torch.stack([gained(row) for row in own]) - kl
        return (1 - torch.sigmoid(signs * away)).mean()

    logs = run_training(folder, f"kto-{layout}", *words, "--kto_beta", "1", kind="kto")
    assert [log["loss"] for log in logs] == pytest.approx(adamw_losses(model, judged), rel=1e-5)
