"""The text of ``mca-train KIND --help``: every key of that kind with its value, default and meaning."""

import textwrap
import typing
from collections.abc import Iterator
from itertools import groupby

from mca_config.fields import TypeHint, alternatives, hint_origin, is_enum
from mca_config.types import Typed
from mca_train.reference.keys import REQUIRED, Key, task_keys
from mca_train.tasks.task import Task

_WIDTH = 90
_LONGEST = 400  # characters of a key's text; Hugging Face's are pages


def task_help(task: Task) -> str:
    """Return the help of one kind of run."""
    lines = [
        f"usage: mca-train {task.name} [CONFIG.yaml] [--key value ...]",
        "",
        f"Trains {task.summary}.",
        "",
        "Write each key in CONFIG.yaml as `key: value`, or pass it as a flag, which wins. Flags alone are enough.",
        "Flags are written with - or _, and `--key null` unsets what the file says.",
        f"Required: {', '.join(REQUIRED)}.",
        f"`mca-train init {task.name} MODEL` writes a file to start from.",
    ]
    for group, keys in groupby(task_keys(task), key=lambda key: key.group):
        lines += ["", f"{group}:"]
        for key in keys:
            lines += _key_help(key)
    examples = (
        f"{task.name} run.yaml",
        f"{task.name} run.yaml --learning_rate 1e-5",
        f"{task.name} --model_name_or_path MODEL --train_file data.jsonl --output_dir runs/first",
        f"plan {task.name} run.yaml",
    )
    lines += ["", "examples:", *(f"  mca-train {example}" for example in examples)]
    return "\n".join(lines) + "\n"


def _key_help(key: Key) -> Iterator[str]:
    default = "" if key.default in (None, "", [], {}) else f" (default: {format_default(key.default)})"
    yield f"  --{key.name} {value_placeholder(key.hint)}"
    text = textwrap.shorten(key.help, _LONGEST, placeholder=" ...") + default
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)


def format_default(value: Typed) -> str:
    """Return a default value in the spelling of a file."""
    plain = getattr(value, "value", value)
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def value_placeholder(hint: TypeHint) -> str:
    """Return the placeholder of a type: ``N``, ``{sum,mean}``, ``TEXT ...``."""
    members = [member for member in alternatives(hint) if member is not type(None)]
    return _value(members[0]) if members else "VALUE"


def _value(member: TypeHint) -> str:
    if is_enum(member):
        return "{" + ",".join(str(choice.value) for choice in member) + "}"
    if hint_origin(member) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(member))) + "}"
    if (hint_origin(member) or member) is list:
        return "TEXT ..."
    words = {bool: "[true|false]", int: "N", float: "X", dict: "JSON"}
    return words.get(hint_origin(member) or member, "TEXT")
