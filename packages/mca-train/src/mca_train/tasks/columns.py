"""`column_problems` finds column keys that a run does not read, from its configuration.

The columns of rows are known only when their file is read, in `data.row_formats`.
"""

from collections.abc import Iterator

from mca_train.config.columns import PairArguments
from mca_train.config.run_config import Settings
from mca_train.data.row_formats import FORMAT_COLUMNS, ONE_ANSWER
from mca_train.tasks.task import Task


def column_problems(task: Task, settings: Settings) -> Iterator[str]:
    """Yield an error for column keys that neither the kind of run nor a configured format reads."""
    if unused := [key for key in settings.values if key in task.unused_columns]:
        yield f"{', '.join(unused)}: mca-train {task.name} does not read it; remove the key"
    data = settings.data
    formats = [entry.get("format") or data.data_format for entry in data.datasets]
    if data.eval_file or not formats:
        formats.append(data.data_format)
    if any(name not in ONE_ANSWER for name in formats):
        return  # inferred from the columns, or unknown and reported elsewhere
    named = [name for name in ONE_ANSWER if name in formats]
    pairs = isinstance(data, PairArguments)  # pairs read answers in every format, and the prompt in none
    read = {"tools_column"} if pairs else {column for name in named for column in FORMAT_COLUMNS[name]}
    choosing = {column for columns in FORMAT_COLUMNS.values() for column in columns} - {*task.unused_columns}
    if unread := [key for key in settings.values if key in choosing - read]:
        yield f"{', '.join(unread)}: format {', '.join(named)} does not read it; remove one of the two"
