"""``mca-train schema``, ``init`` and ``completion``: what they print or write."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.files import cannot_write
from mca_train.config.fields import nearest
from mca_train.tasks.table import TASKS
from mca_train.tasks.task import Task


def print_schema(words: Sequence[str]) -> int:
    """``schema [KIND]``: the JSON schema of a configuration file."""
    from mca_train.reference.schema import schema

    tasks = [_task(words[0])] if words else list(TASKS.values())
    if len(words) > 1:
        raise UsageError(f"unexpected argument '{words[1]}'; write mca-train schema [KIND] > schema.json")
    sys.stdout.write(json.dumps(schema(tasks), indent=2) + "\n")
    return 0


def write_starter(words: Sequence[str]) -> int:
    """``init KIND MODEL [FILE]``: a commented configuration, printed or written to a new file."""
    import torch

    from mca_train.reference.starter import starter

    if not 2 <= len(words) <= 3:
        raise UsageError(
            "mca-train init needs a kind and a model: mca-train init sft models/qwen3 [run.yaml]"
        )
    text = starter(_task(words[0]), words[1], gpu=torch.cuda.is_available())
    if len(words) == 2:
        sys.stdout.write(text)
        return 0
    path = Path(words[2])
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another file") from None
    except OSError as error:
        raise cannot_write(path, error) from error
    sys.stdout.write(f"wrote {path}; next: edit it, then mca-train plan {words[0]} {path}\n")
    return 0


def print_completion(words: Sequence[str], commands: Sequence[str]) -> int:
    """``completion SHELL``: the script that completes this command's words."""
    from mca_train.reference.completion import SHELLS, completion

    if len(words) != 1:
        raise UsageError(f"mca-train completion needs a shell: {', '.join(SHELLS)}")
    sys.stdout.write(completion(words[0], commands, TASKS))
    return 0


def _task(name: str) -> Task:
    if name not in TASKS:
        known = f"it is one of {', '.join(TASKS)}"
        raise UsageError(f"unknown kind '{name}'{nearest(name, TASKS, known)}")
    return TASKS[name]
