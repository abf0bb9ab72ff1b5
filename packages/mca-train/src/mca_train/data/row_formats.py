"""Which format rows have is decided here, for rows with one answer and for pairs.

It is the one that ``data_format`` names, or the one that reads the columns that were given names, or else the first one
whose columns are there. How rows of a format become what is trained on is in `formats` and `encoding`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mca_config.errors import UsageError
from mca_train.config.arguments import DataArguments
from mca_train.config.columns import PairArguments
from mca_train.config.default_column import explicit_columns

Format = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"]

ONE_ANSWER: tuple[Format, ...] = ("messages", "prompt_completion", "alpaca", "sharegpt", "text")
"""The formats of rows with one answer; of several that rows have, the first one is read."""

FORMAT_COLUMNS: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages_column", "tools_column"),
    "prompt_completion": ("prompt_column", "completion_column", "tools_column"),
    "alpaca": ("completion_column", "tools_column"),
    "sharegpt": ("tools_column",),
    "text": ("text_column",),
}
"""The keys of the columns that formats of one answer read, of those that not all read."""

_CONVERSATIONS = ("conversations", "conversation")

FORMAT_BY_COLUMN: Mapping[str, Literal["alpaca", "sharegpt"]] = {
    "instruction": "alpaca",
    "output": "alpaca",
    "conversations": "sharegpt",
    "conversation": "sharegpt",
}
"""Columns that one other program's shape alone has."""

_TOOLS = "tools_column"


def conversation_in(names: Iterable[str]) -> str:
    """ShareGPT's column of turns among ``names``."""
    known = {*names}
    return next((name for name in _CONVERSATIONS if name in known), _CONVERSATIONS[0])


def alpaca_answer(arguments: DataArguments) -> str:
    """The column with the answer of Alpaca's rows."""
    return arguments.completion_column if "completion_column" in explicit_columns(arguments) else "output"


def detect_format(
    names: Sequence[str], arguments: DataArguments, key: str, known: Sequence[Format] = ONE_ANSWER
) -> Format:
    """The format of rows with one answer, or with one text.

    Args:
        names: Their columns.
        arguments: Columns, and the format if it is named.
        key: The argument that named the files, for errors.
        known: The formats that may be.

    Raises:
        UsageError: They are of none, or do not have, or cannot be read with, a column that was given a name.
    """
    named = next((each for each in known if each == arguments.data_format), None)
    if named is not None:
        needed = _columns(named, names, arguments)
        if {*(needed[-1:] if named == "alpaca" else needed)} <= {*names}:  # any other may hold the question
            return named
        raise _unknown_format(names, arguments, key, known, f" of data_format {named}")
    whole = [each for each in known if {*_columns(each, names, arguments)} <= {*names}]
    given = explicit_columns(arguments) & {column for each in known for column in FORMAT_COLUMNS[each]}
    if given:
        return _format_with_columns(given, whole, names, arguments, key, known)
    if not whole:
        raise _unknown_format(names, arguments, key, known)
    return whole[0]


def _format_with_columns(
    given: frozenset[str],
    whole: Sequence[Format],
    names: Sequence[str],
    arguments: DataArguments,
    key: str,
    known: Sequence[Format],
) -> Format:
    """The format that reads all columns of the keys ``given`` that are there; ``whole`` are those that rows have."""
    told = _describe_columns(names, whole[:1])
    there = {column for column in given if getattr(arguments, column) in names}
    choosing = given - {_TOOLS}
    for column in sorted({_TOOLS} & given | (set() if choosing & there else choosing)):
        require_named_column(column, names, arguments, key, told)
    fitting = [each for each in known if there <= {*FORMAT_COLUMNS[each]}]
    for each in fitting:
        if each in whole and not (each == "alpaca" and "prompt_column" in given):
            return each
    which = " and ".join(f"{column} '{getattr(arguments, column)}'" for column in sorted(there))
    if not fitting:
        raise UsageError(
            f"{key}: no format reads {which} ({told}); set data_format, or remove one of the keys"
        )
    lacking = next(name for name in _columns(fitting[0], names, arguments) if name not in names)
    by = next(column for column in FORMAT_COLUMNS[fitting[0]] if getattr(arguments, column) == lacking)
    raise UsageError(
        f"{key}: {which} is of format {fitting[0]}, which needs a column '{lacking}' too ({told}); set {by}, or "
        f"remove {', '.join(sorted(there))}"
    )


def detect_pair_format(
    names: Sequence[str], arguments: PairArguments, key: str
) -> Literal["alpaca", "sharegpt"] | None:
    """The format of rows with two answers; None: they have the columns of pairs themselves.

    Raises:
        UsageError: They do not have the answers, or a column that was given a name.
    """
    for column in ("chosen_column", "rejected_column"):
        if (name := getattr(arguments, column)) not in names:
            raise UsageError(f"{key}: no column '{name}' ({_describe_columns(names)}); set {column}")
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
    column: str, names: Sequence[str], arguments: DataArguments, key: str, told: str | None = None
) -> None:
    """Refuses rows without a column that was given a name.

    Args:
        column: The key that names it.
        names: The rows' columns.
        arguments: The names of columns.
        key: The argument that named the files, for errors.
        told: What the rows have, in words; None: ``names``.
    """
    if (name := getattr(arguments, column)) not in names:
        raise UsageError(
            f"{key}: no column '{name}', which {column} names ({told or _describe_columns(names)}); correct {column}, "
            "or remove it"
        )


def _describe_columns(names: Sequence[str], found: Sequence[Format] = ()) -> str:
    """What rows have, in words."""
    return f"columns: {', '.join(names)}" + "".join(f"; format found: {each}" for each in found[:1])


def _columns(kind: Format, names: Sequence[str], arguments: DataArguments) -> tuple[str, ...]:
    """What rows of a format must have, the answer last."""
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
    """The error of rows that are of none of the formats ``known``."""
    needed = [" with ".join(f"'{name}'" for name in _columns(each, (), arguments)) for each in known]
    keys = dict.fromkeys(column for each in known for column in FORMAT_COLUMNS[each] if column != _TOOLS)
    return UsageError(
        f"{key}: columns {', '.join(names)}{of}; expected {', '.join(needed[:-1])} or {needed[-1]} "
        f"(set {' or '.join(keys)})"
    )
