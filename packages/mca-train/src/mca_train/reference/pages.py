"""Tables of keys in the documentation, generated from the classes that parse a run.

Run ``python -m mca_train.reference.pages docs/*.md``; a test fails when that is needed. A table is between
``<!-- NAME -->`` and ``<!-- end NAME -->``, where NAME is one of `TABLES`.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields

from mca_config.reference import Tables, cell, update_files
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.config.renamed_options import RENAMED
from mca_train.reference.keys import Key, declared_keys, format_default, value_placeholder
from mca_train.tasks.table import TASKS
from mca_train.tasks.task import Task

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


def _task_table(task: Task) -> Callable[[], str]:
    """Return the generator of the table of keys that only ``task`` has: its columns and arguments."""

    def table() -> str:
        common = {one.name for one in fields(DataArguments)}
        classes = [task.data_arguments, *([task.task_arguments] if task.task_arguments else [])]
        return _rows(key for cls in classes for key in declared_keys(cls, "") if key.name not in common)

    return table


def _rows(keys: Iterable[Key]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = "" if key.default in (None, "", [], {}) else f"`{format_default(key.default)}`"
        value = value_placeholder(key.hint).replace("|", " or ").strip("[]{}").replace(",", ", ")
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
