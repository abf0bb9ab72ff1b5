"""The keys of each kind of run, from the dataclasses that parse a run."""

import ast
import dataclasses
import enum
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mca_config.fields import TypeHint
from mca_config.suggestions import suggestion
from mca_config.types import Typed
from mca_train.config.arguments import LaunchArguments, LoraArguments
from mca_train.config.renamed_options import RENAMED
from mca_train.tasks.task import Task

_CLASS, _WORDS = "TrainingArguments", "ExplicitEnum"
_FILES = ("debug_utils.py", "trainer_utils.py", "training_args.py")
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
    from mca_config._hf_arguments import REFUSED
    from mca_config.arguments import MegatronArguments

    groups = [
        ("model and data", task.data_arguments),
        *([(f"{task.name} alone", task.task_arguments)] if task.task_arguments else []),
        ("ranks of this machine", LaunchArguments),
        ("LoRA", LoraArguments),
        ("Megatron: parallelism, experts, optimizer, checkpoints", MegatronArguments),
        ("Hugging Face's TrainingArguments", hf_arguments()),
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
    from mca_config._hf_arguments import REFUSED

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
                help=" ".join(str(field.metadata.get("help", "")).split()),
                group=group,
            )


def _default(field: "dataclasses.Field[Typed]") -> Typed:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def hf_arguments() -> type:
    """Return a dataclass with the fields of Hugging Face's ``TrainingArguments``: names, types, defaults, help texts.

    They are read from the source of the installed transformers, with the enumerations of their choices: its import
    takes seconds, ``--help`` 0.2 s.

    If the source cannot be read in this way, return the class itself.
    """
    try:
        return read_hf_arguments()
    except Exception:  # the source of another version may differ in any way
        from mca_config.training import TrainingArguments

        return TrainingArguments


def read_hf_arguments() -> type:
    """Return that dataclass from the source; any error means that the source is of another form."""
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    texts = [Path(found.origin).with_name(name).read_text(encoding="utf-8") for name in _FILES]
    classes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    kept = [node for node in classes if node.name == _CLASS or _WORDS in map(ast.unparse, node.bases)]
    for node in kept:
        node.body = [each for part in node.body for each in _fields_and_constants(part)]
        node.decorator_list = []
    known = {_WORDS: enum.Enum, "field": dataclasses.field, "Any": object, "Literal": typing.Literal}
    known |= {"ParallelismConfig": object, "trainer_log_levels": {}}
    exec(compile(ast.Module([*kept], []), str(found.origin), "exec"), known)
    return dataclasses.dataclass(typing.cast(type, known[_CLASS]))


def _fields_and_constants(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the fields and constants of a class; all values of a constant that depends on the machine."""
    if isinstance(node, ast.AnnAssign):
        yield node
    elif isinstance(node, ast.Assign | ast.If):
        inner = (each for each in ast.walk(node) if isinstance(each, ast.Assign))
        yield from (each for each in inner if isinstance(each.value, ast.Constant))
