"""The keys of each kind of run, from the dataclasses that parse a run."""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mca_config.fields import TypeHint
from mca_config.printable import suggestion
from mca_config.types import Typed
from mca_train.config.arguments import LaunchArguments, LoraArguments
from mca_train.config.hf_fields import hf_fields
from mca_train.config.renamed_options import RENAMED
from mca_train.tasks.task import Task

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
        ("Hugging Face's TrainingArguments", hf_fields()),
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
