"""The commands ``mca-train schema``, ``init`` and ``completion``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.files import write_error
from mca_config.suggestions import suggestion
from mca_train.reference.program import program
from mca_train.tasks.table import TASKS
from mca_train.tasks.task import Task


def print_schema(words: Sequence[str]) -> int:
    """Run ``schema [KIND]``: print the JSON schema of a configuration file."""
    from mca_train.reference.schema import schema

    tasks = [parse_kind(words[0])] if words else list(TASKS.values())
    if len(words) > 1:
        raise UsageError(f"unexpected argument '{words[1]}'; write mca-train schema [KIND] > schema.json")
    sys.stdout.write(json.dumps(schema(tasks), indent=2) + "\n")
    return 0


def write_starter(words: Sequence[str]) -> int:
    """Run ``init KIND MODEL [FILE]``: print a commented configuration, or write it to a new file."""
    if not 2 <= len(words) <= 3:
        raise UsageError(
            "mca-train init needs a kind and a model: mca-train init sft models/qwen3 [run.yaml]"
        )
    task, path = parse_kind(words[0]), Path(words[2]) if len(words) > 2 else None
    note = _model_problem(words[1])
    if path is not None and path.exists():
        raise UsageError(f"{path} exists; name another file")
    import torch

    from mca_train.reference.starter import starter

    text = starter(task, words[1], gpu=torch.cuda.is_available())
    if path is None:
        sys.stdout.write(text)
    else:
        _write_new(path, text)
        sys.stdout.write(f"wrote {path}; next: edit it, then mca-train plan {words[0]} {path}\n")
    if note:
        sys.stderr.write(f"note: {note}\n")
    return 0


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another file") from None
    except OSError as error:
        raise write_error(path, error) from error


def _model_problem(model: str) -> str:
    """Return a note about a model that is not on this machine; empty: it is.

    Raises:
        UsageError: There is no such directory, and the name is not a Hub id.
    """
    from mca_models.hub import is_hub_id

    if is_hub_id(model):
        return f"there is no directory {model} here, so a run would download the model {model} from the Hub"
    folder = Path(model)
    if not folder.exists():
        raise UsageError(
            f"model {model}: no such directory; expected one with a config.json, or a model of the Hub (org/name)"
        )
    if not any((folder / name).is_file() for name in ("config.json", "mca_config.json")):
        raise UsageError(f"model {model}: expected a directory with a config.json or an mca_config.json")
    return ""


def print_completion(words: Sequence[str]) -> int:
    """Run ``completion SHELL``: print the completion script of this command."""
    from mca_config.completion import SHELLS, completion
    from mca_train.reference.keys import task_keys

    if len(words) != 1:
        raise UsageError(f"mca-train completion needs a shell: {', '.join(SHELLS)}")
    known = program()
    keys = {name: [f"--{key.name}" for key in task_keys(task)] for name, task in TASKS.items()}
    keys |= {name: sorted({flag for some in keys.values() for flag in some}) for name in ("plan", "data")}
    keys["tokenize"] = keys["pretrain"]
    flags = {name: [*known.parser(name).flags, *keys.get(name, ())] for name in known.commands}
    sys.stdout.write(completion(known.name, words[0], flags))
    return 0


def parse_kind(name: str) -> Task:
    """Return the kind of run with this name.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in TASKS:
        known = f"it is one of {', '.join(TASKS)}"
        raise UsageError(f"unknown kind '{name}'{suggestion(name, TASKS, known)}")
    return TASKS[name]
