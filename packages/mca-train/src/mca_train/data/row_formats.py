"""Detection of the row format, for rows with one answer and for preference pairs.

The format is ``data_format``, or the one that reads the renamed columns, or the first one whose columns are present.
`formats` and `encoding` process the rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mca_config.errors import UsageError
from mca_train.config.arguments import DataArguments, PairArguments, explicit_columns

Format = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"]

ONE_ANSWER: tuple[Format, ...] = ("messages", "prompt_completion", "alpaca", "sharegpt", "text")
"""Formats of rows with one answer; the first match wins."""

FORMAT_COLUMNS: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages_column", "tools_column"),
    "prompt_completion": ("prompt_column", "completion_column", "tools_column"),
    "alpaca": ("completion_column", "tools_column"),
    "sharegpt": ("tools_column",),
    "text": ("text_column",),
}
"""Column keys that only some formats with one answer read."""

_CONVERSATIONS = ("conversations", "conversation")

FORMAT_BY_COLUMN: Mapping[str, Literal["alpaca", "sharegpt"]] = {
    "instruction": "alpaca",
    "output": "alpaca",
    "conversations": "sharegpt",
    "conversation": "sharegpt",
}
"""Columns that identify the Alpaca or the ShareGPT format."""

_TOOLS = "tools_column"


def conversation_in(names: Iterable[str]) -> str:
    """Return ShareGPT's column of turns among ``names``."""
    known = {*names}
    return next((name for name in _CONVERSATIONS if name in known), _CONVERSATIONS[0])


def alpaca_answer(arguments: DataArguments) -> str:
    """Return the column with the answer of Alpaca rows."""
    return arguments.completion_column if "completion_column" in explicit_columns(arguments) else "output"


def detect_format(
    names: Sequence[str], arguments: DataArguments, key: str, known: Sequence[Format] = ONE_ANSWER
) -> Format:
    """Detect the format of rows with one answer or one text.

    Args:
        names: Columns of the rows.
        arguments: Names of columns, and ``data_format``.
        key: Argument that names the files, for errors.
        known: Formats to consider.

    Raises:
        UsageError: No format matches, or a renamed column is missing or not read by the format.
    """
    named = next((each for each in known if each == arguments.data_format), None)
    if named is not None:
        needed = _columns(named, names, arguments)
        # in Alpaca rows any column may contain the question
        if {*(needed[-1:] if named == "alpaca" else needed)} <= {*names}:
            return named
        raise _unknown_format(names, arguments, key, known, f" of data_format {named}")
    whole = [each for each in known if {*_columns(each, names, arguments)} <= {*names}]
    renamed = explicit_columns(arguments) & {column for each in known for column in FORMAT_COLUMNS[each]}
    if renamed:
        return _format_with_columns(renamed, whole, names, arguments, key, known)
    if not whole:
        raise _unknown_format(names, arguments, key, known)
    return whole[0]


def _format_with_columns(
    renamed: frozenset[str],
    whole: Sequence[Format],
    names: Sequence[str],
    arguments: DataArguments,
    key: str,
    known: Sequence[Format],
) -> Format:
    """Return the format of ``whole``, those that the rows match, that reads the present columns of ``renamed``."""
    description = _describe_columns(names, whole[:1])
    present = {column for column in renamed if getattr(arguments, column) in names}
    choosing = renamed - {_TOOLS}
    for column in sorted({_TOOLS} & renamed | (set() if choosing & present else choosing)):
        require_named_column(column, names, arguments, key, description)
    fitting = [each for each in known if present <= {*FORMAT_COLUMNS[each]}]
    for each in fitting:
        if each in whole and not (each == "alpaca" and "prompt_column" in renamed):
            return each
    which = " and ".join(f"{column} '{getattr(arguments, column)}'" for column in sorted(present))
    if not fitting:
        raise UsageError(
            f"{key}: no format reads {which} ({description}); set data_format, or remove one of the keys"
        )
    lacking = next(name for name in _columns(fitting[0], names, arguments) if name not in names)
    by = next(column for column in FORMAT_COLUMNS[fitting[0]] if getattr(arguments, column) == lacking)
    raise UsageError(
        f"{key}: {which} is of format {fitting[0]}, which needs a column '{lacking}' too ({description}); set {by}, or "
        f"remove {', '.join(sorted(present))}"
    )


def detect_pair_format(
    names: Sequence[str], arguments: PairArguments, key: str
) -> Literal["alpaca", "sharegpt"] | None:
    """Detect the format of preference pairs; None: they need no conversion.

    Raises:
        UsageError: An answer or a renamed column is missing.
    """
    for column in ("chosen_column", "rejected_column"):
        if (name := getattr(arguments, column)) not in names:
            raise UsageError(
                f"{key}: no column '{name}' ({_describe_columns(names)}); preference pairs have chosen and rejected, "
                f"and mca-train sft reads messages; set {column} if the column has another name"
            )
    if _TOOLS in explicit_columns(arguments):
        require_named_column(_TOOLS, names, arguments, key)
    if arguments.data_format == "alpaca" or arguments.data_format == "sharegpt":
        return arguments.data_format
    if not {arguments.messages_column, arguments.prompt_column}.isdisjoint(names):
        return None
    found: list[Literal["alpaca", "sharegpt"]] = []
    found += ["alpaca"] if "instruction" in names else []
    found += ["sharegpt"] if not {*_CONVERSATIONS}.isdisjoint(names) else []
    if found and "prompt_column" in explicit_columns(arguments):
        require_named_column("prompt_column", names, arguments, key, _describe_columns(names, found))
    return found[0] if found else None


def require_named_column(
    column: str, names: Sequence[str], arguments: DataArguments, key: str, description: str | None = None
) -> None:
    """Raise an error for rows without a renamed column.

    Args:
        column: Key of the column.
        names: Columns of the rows.
        arguments: Names of columns.
        key: Argument that names the files, for errors.
        description: Description of the columns; None: list ``names``.
    """
    if (name := getattr(arguments, column)) not in names:
        raise UsageError(
            f"{key}: no column '{name}', which {column} names ({description or _describe_columns(names)}); correct "
            f"{column}, "
            "or remove it"
        )


def _describe_columns(names: Sequence[str], found: Sequence[Format] = ()) -> str:
    """Describe the columns of rows."""
    return f"columns: {', '.join(names)}" + "".join(f"; format found: {each}" for each in found[:1])


def _columns(kind: Format, names: Sequence[str], arguments: DataArguments) -> tuple[str, ...]:
    """Return the required columns of a format, the answer last."""
    columns: Mapping[Format, tuple[str, ...]] = {
        "messages": (arguments.messages_column,),
        "prompt_completion": (arguments.prompt_column, arguments.completion_column),
        "alpaca": ("instruction", alpaca_answer(arguments)),
        "sharegpt": (conversation_in(names),),
        "text": (arguments.text_column,),
    }
    return columns[kind]


def _unknown_format(
    names: Sequence[str], arguments: DataArguments, key: str, known: Sequence[Format], of: str = ""
) -> UsageError:
    """Return the error for rows of none of the formats ``known``."""
    needed = [" with ".join(f"'{name}'" for name in _columns(each, (), arguments)) for each in known]
    keys = dict.fromkeys(column for each in known for column in FORMAT_COLUMNS[each] if column != _TOOLS)
    return UsageError(
        f"{key}: columns {', '.join(names)}{of}; expected {', '.join(needed[:-1])} or {needed[-1]} "
        f"(set {' or '.join(keys)})"
    )
