"""`column_problems` finds keys of columns that were set and that a run does not read, as its configuration shows it.

Which columns rows have is known only when their file is read, in `data.row_formats`.
"""

from collections.abc import Iterator

from mca_train.config.columns import PairArguments
from mca_train.config.run_config import Settings
from mca_train.data.row_formats import FORMAT_COLUMNS, ONE_ANSWER
from mca_train.tasks.task import Task


def column_problems(task: Task, settings: Settings) -> Iterator[str]:
    """Keys of rows that neither the kind of run nor any format that is named reads."""
    if given := [key for key in settings.values if key in task.unused_columns]:
        yield f"{', '.join(given)}: mca-train {task.name} does not read it; remove the key"
    data = settings.data
    formats = [entry.get("format") or data.data_format for entry in data.datasets]
    if data.eval_file or not formats:
        formats.append(data.data_format)
    if any(each not in ONE_ANSWER for each in formats):
        return  # one that is not named is found by the columns, and one that is unknown is refused elsewhere
    named = [each for each in ONE_ANSWER if each in formats]
    pairs = isinstance(data, PairArguments)  # whose answers are read of every shape, and the prompt of none
    read = {"tools_column"} if pairs else {column for each in named for column in FORMAT_COLUMNS[each]}
    choosing = {column for columns in FORMAT_COLUMNS.values() for column in columns} - {*task.unused_columns}
    if unread := [key for key in settings.values if key in choosing - read]:
        yield f"{', '.join(unread)}: format {', '.join(named)} does not read it; remove one of the two"
