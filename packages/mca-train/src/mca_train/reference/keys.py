"""The keys of each kind of run, from the dataclasses that parse a run: their help, and tables in the documentation.

Run ``python -m mca_train.reference.keys docs/keys.md docs/reference/renamed_keys.md``; a test fails when that is
needed. A table is between ``<!-- NAME -->`` and ``<!-- end NAME -->``, where NAME is one of `TABLES`.
"""

import dataclasses
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, takewhile

from mca_config.fields import TypeHint, alternatives, hint_origin, is_enum
from mca_config.printable import INDENT, first_line, fit_choices, suggestion, terminal_width
from mca_config.reference import Tables, cell, update_files
from mca_config.types import Typed
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.config.early_arguments import hf_fields
from mca_train.config.renamed_options import RENAMED
from mca_train.tasks import TASKS
from mca_train.tasks.task import Task

_CLEARER = {
    "max_steps": "Steps to train; overrides num_train_epochs. Streaming needs it.",
    "resume_from_checkpoint": "Checkpoint to continue from: its directory, or auto for the newest in output_dir.",
    "eval_delay": "Epochs or steps, as eval_strategy says, before the first evaluation.",
    "log_on_each_node": "Log once per node, not on the main node only.",
    "full_determinism": "Use deterministic algorithms. They are slow and meant for debugging.",
    "use_cache": "Use the model's key-value cache. Training needs none.",
    "local_rank": "Rank on this machine. torchrun sets it in the environment.",
}  # where Hugging Face's text is too long for a line, or does not say what mca does
REQUIRED = ("model_name_or_path", "train_file", "output_dir")
"""Keys that every run needs, in display order."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration.

    Args:
        name: Name in the file; the flag is ``--name``.
        hint: The type of its value.
        default: Default value.
        help: Meaning, in one paragraph.
        group: Heading in the help.
    """

    name: str
    hint: TypeHint
    default: Typed
    help: str
    group: str


def task_keys(task: Task) -> tuple[Key, ...]:
    """Return all supported keys of ``task``, group by group."""
    from mca_config.arguments import MegatronArguments
    from mca_config.training_checks import REFUSED

    groups = [
        ("model and data", task.data_arguments),
        *([(f"{task.name} alone", task.task_arguments)] if task.task_arguments else []),
        ("ranks of this machine", LaunchArguments),
        ("LoRA", LoraArguments),
        ("Megatron: parallelism, experts, optimizer, checkpoints", MegatronArguments),
        ("Hugging Face's TrainingArguments", hf_fields(all_optimizers=False)),
    ]
    found: dict[str, Key] = {}
    for group, cls in groups:
        for key in declared_keys(cls, group):
            if key.name not in REFUSED:
                found.setdefault(key.name, key)
    return tuple(found.values())


def unknown_flags(tasks: Iterable[Task], flags: Sequence[str], words: Iterable[str]) -> list[str]:
    """Return messages about the flags among ``words`` that are not keys.

    Args:
        tasks: Kinds of run with the known keys.
        flags: Flags of the command itself, for suggestions.
        words: Words of the command line, without those of ``flags``.
    """
    from mca_config.training_checks import REFUSED

    tasks = list(tasks)
    kind = tasks[0].name if len(tasks) == 1 else "KIND"
    known = [f"--{name}" for name in dict.fromkeys(key.name for task in tasks for key in task_keys(task))]
    problems = []
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        name = flag.removeprefix("--")
        if name in RENAMED:
            problems.append(f"{flag}: {RENAMED[name]}")
        elif flag not in known and name not in REFUSED:
            ending = suggestion(flag, [*known, *flags], f"mca-train {kind} --help lists the keys")
            problems.append(f"unknown flag {flag}{ending}")
    return problems


def declared_keys(cls: type, group: str) -> Iterator[Key]:
    """Yield the keys that a class of arguments declares.

    Args:
        cls: A dataclass.
        group: Heading in the help.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield Key(
                name=field.name,
                hint=hints[field.name],
                default=_default(field),
                help=_help_text(_CLEARER.get(field.name) or str(field.metadata.get("help", ""))),
                group=group,
            )


def _help_text(text: str) -> str:
    """Return a help text in one line: "unset" replaces None, and "Whether to" and a second default are removed."""
    line = re.sub(r"^Whether (or not )?to (\w)", lambda found: found[2].upper(), " ".join(text.split()))
    line = line.replace("' (default),", "',")
    return re.sub(r"\bNone:", "unset:", re.sub(r"(?<=\. )None:", "Unset:", line))


def _default(field: "dataclasses.Field[Typed]") -> Typed:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def task_help(task: Task) -> str:
    """Return the help of one kind of run."""
    lines = [
        f"usage: mca-train {task.name} [CONFIG.yaml] [--key value ...]",
        "",
        f"Trains {task.summary}.",
        "",
        "Write each key in CONFIG.yaml as `key: value`, or pass it as a flag, which wins. Flags alone are enough.",
        "Flags are written with - or _, and `--key null` unsets what the file says.",
        "docs/keys.md explains them in full.",
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
    flag = f"  --{key.name} "
    yield flag + fit_choices(value_placeholder(key.hint), len(flag))
    indent = " " * INDENT
    text = first_line(key.help, default)
    yield from textwrap.wrap(text, terminal_width(), initial_indent=indent, subsequent_indent=indent)


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


_VALUES = {"N": "integer", "X": "number", "TEXT": "text", "TEXT ...": "list", "JSON": "mapping"}


def _renamed_table() -> str:
    """Return the table of keys of other programs; keys with the same replacement share a row."""
    rows: dict[str, list[str]] = {}
    for key, message in RENAMED.items():
        words = message.split()
        rows.setdefault(f"`{words[2]}`" if message.startswith("is called ") else message, []).append(
            f"`{key}`"
        )
    lines = [f"| {', '.join(keys)} | {message} |" for message, keys in rows.items()]
    return "\n".join(["| elsewhere | here |", "|---|---|", *lines])


def _keys(*classes: type) -> Callable[[], str]:
    return lambda: _rows(key for cls in classes for key in declared_keys(cls, ""))


def _task_keys(task: Task) -> Iterator[Key]:
    """Yield the keys of ``task`` that not every kind of run has: its columns and arguments."""
    common = {one.name for one in fields(DataArguments)}
    for cls in (task.data_arguments, task.task_arguments):
        yield from (key for key in declared_keys(cls, "") if key.name not in common) if cls else ()


def _task_table(task: Task) -> Callable[[], str]:
    """Return the generator of the table of keys of ``task``; a line names those that an earlier table has."""

    def table() -> str:
        earlier: dict[str, str] = {}
        for other in takewhile(lambda other: other is not task, TASKS.values()):
            earlier = {key.name: other.name for key in _task_keys(other)} | earlier
        rows = _rows(key for key in _task_keys(task) if key.name not in earlier)
        repeated = [f"`{key.name}` ({earlier[key.name]})" for key in _task_keys(task) if key.name in earlier]
        return f"{rows}\n\nAlso {', '.join(repeated)}." if repeated else rows

    return table


def _rows(keys: Iterable[Key]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = "" if key.default in (None, "", [], {}) else f"`{format_default(key.default)}`"
        value = value_placeholder(key.hint).replace("|", "/").strip("[]{}").replace(",", ", ")
        value = _VALUES.get(value, value)
        lines.append(f"| `{key.name}` | {value} | {default} | {cell(key.help)} |")
    return "\n".join(lines)


TABLES: Tables = {
    "renamed": _renamed_table,
    "keys of data": _keys(DataArguments, LaunchArguments),
    "keys of lora": _keys(LoraArguments),
    **{f"keys of {name}": _task_table(task) for name, task in TASKS.items()},
}


if __name__ == "__main__":
    update_files(TABLES)
