"""Runs of ``mca-train`` on small files: what they train on, how they are configured, what they logged."""

import json
import subprocess
from pathlib import Path
from typing import Any

import forked_cli
from train_cases import tiny_checkpoint


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, name: str, **changes: Any) -> list[str]:
    values = {"train_file": str(folder / "train.jsonl"), "seq_length": 64, "per_device_train_batch_size": 2}
    return forked_cli.command(folder, "sft" if "sft" in name else "pretrain", name, values | changes)


def as_flags(command: list[str]) -> list[str]:
    """Return ``command`` with the lines of its YAML file as flags, and no file."""
    pairs = [line.split(": ", 1) for line in Path(command[-1]).read_text().splitlines()]
    return [*command[:-1], *(word for key, value in pairs for word in (f"--{key}", value.strip('"')))]


def logs(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]


def launched(folder: Path, kind: str, name: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    values = {"train_file": str(folder / "rows.jsonl"), "seq_length": 32, "per_device_train_batch_size": 1}
    return forked_cli.launched(forked_cli.command(folder, kind, name, values | changes))


def fill(folder: Path) -> Path:
    """Puts a model there, texts and a chat."""
    from tokenizers_for_tests import byte_tokenizer

    tiny_checkpoint(folder / "model", vocab_size=264)
    byte_tokenizer().save_pretrained(folder / "model")
    text = Path(json.__file__).read_text()
    pieces = [text[i : i + 200] for i in range(0, len(text), 200)]
    write(folder / "train.jsonl", [{"text": piece} for piece in pieces[:-8]])
    write(folder / "eval.jsonl", [{"text": piece} for piece in pieces[-8:]])
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]
    write(folder / "chat.jsonl", [{"messages": turns}] * 12)
    return folder
