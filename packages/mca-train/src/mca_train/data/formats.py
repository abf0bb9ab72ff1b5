"""Detection of row formats, and conversion of Alpaca and ShareGPT rows to chat messages.

    alpaca      instruction, input, output (or chosen, rejected); also system, history
    sharegpt    conversations of {"from": "human" | "gpt" | ..., "value": text}; also system, tools, chosen, rejected

OpenAI messages with tools and TRL formats need no conversion. `chat_template_kwargs` is kept in all formats. Answers
and tools may be in renamed columns. `encoding` interprets the rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from mca_config.errors import McaError, UsageError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import (
    ClassifyArguments,
    DataArguments,
    DefaultColumn,
    PairArguments,
    explicit_columns,
)
from mca_train.data.message_parts import MEDIA
from mca_train.data.tools import Tools, as_functions, parse_calls, parse_tools

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
    description = _describe_columns(names, whole)
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
                f"and mca-train sft reads messages; set {column} if the column has another name{_kind_hint(names)}"
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
            f"{column}, or remove it"
        )


def require_label_column(names: Sequence[str], arguments: ClassifyArguments, key: str) -> None:
    """Raise an error for rows without the column of labels."""
    column = arguments.label_column
    if column not in names:
        raise UsageError(
            f"{key}: no column '{column}' ({_describe_columns(names)}); set label_column{_kind_hint(names)}"
        )


_ROWS_OF_KINDS: Mapping[tuple[str, ...], str] = {
    ("chosen", "rejected"): "dpo or reward",
    ("prompt", "completion", "label"): "kto",
    ("messages", "label"): "classify or kto",
    ("text", "label"): "classify",
}
"""Kinds of run that read rows with these columns."""


def _kind_hint(names: Sequence[str]) -> str:
    """Return the end of an error that names the kinds of run with such rows; empty: no kind is certain."""
    found = (kinds for columns, kinds in _ROWS_OF_KINDS.items() if {*columns} <= {*names})
    return next((f"; these are rows of mca-train {kinds}" for kinds in found), "")


def _describe_columns(names: Sequence[str], found: Sequence[Format] = ()) -> str:
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
        f"(set {' or '.join(keys)}){_kind_hint(names)}"
    )


COLUMNS = frozenset(
    {"instruction", "input", "output", "history", "system", "conversations", "conversation", "tools"}
)
"""Columns of Alpaca and ShareGPT rows."""

NO_TEMPLATE = (
    "the tokenizer has no chat template; put a chat_template.jinja into its directory, or set tokenizer_name_or_path "
    "to an instruction-tuned model"
)
"""Error about rows that are conversations."""

TEMPLATE_INPUTS = "chat_template_kwargs"
"""Column of template variables, named as in TRL."""

COLUMN_KEYS = {medium: f"{medium}s_column" for medium in MEDIA}
"""Arguments that name the columns of media. LLaVA and TRL rows may have one medium in a column named after it."""

_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}


def columns_by_medium(vision: Values | None, arguments: DataArguments) -> dict[str, tuple[str, ...]]:
    """Return the columns with a row's media: such as ``images_column``, and for vision models `image` unless it is set.

    Args:
        vision: Vision configuration of the model; None: a text model.
        arguments: Names of columns.
    """
    found: dict[str, tuple[str, ...]] = {}
    for medium, key in COLUMN_KEYS.items():
        named: str = getattr(arguments, key)
        single = vision is not None and isinstance(named, DefaultColumn)
        found[medium] = (named, medium) if single else (named,)
    return found


def media_columns(vision: Values | None, arguments: DataArguments) -> tuple[str, ...]:
    """Return the columns of all media."""
    return tuple(name for names in columns_by_medium(vision, arguments).values() for name in names)


@dataclass(frozen=True)
class RowConverter:
    """Converter of rows in another format.

    Args:
        columns: Columns after the conversion, each with the function from a row to its value.
    """

    columns: Mapping[str, Callable[[Values], object]]

    @property
    def names(self) -> tuple[str, ...]:
        """Columns after the conversion."""
        return tuple(self.columns)

    def convert(self, row: Values) -> JsonObject:
        """Return the converted row."""
        return {name: make(row) for name, make in self.columns.items()}


def row_converter(
    names: Sequence[str], arguments: DataArguments, key: str, *, pairs: bool = False
) -> RowConverter | None:
    """Return the converter of rows with the columns ``names``; None: they need none.

    Args:
        names: Columns of the rows.
        arguments: Names of columns, and ``data_format``.
        key: Argument that names the files, for errors.
        pairs: Rows are preference pairs.

    Raises:
        UsageError: No format has these columns.
    """
    own = cast("PairArguments", arguments) if pairs else None
    kind = detect_format(names, arguments, key) if own is None else detect_pair_format(names, own, key)
    if kind not in ("alpaca", "sharegpt"):
        return None
    turns = _alpaca_turns if kind == "alpaca" else partial(_sharegpt_turns, column=conversation_in(names))
    columns: dict[str, Callable[[Values], object]] = {}
    if own is not None:
        columns[own.prompt_column] = turns
        for name in (own.chosen_column, own.rejected_column):
            columns[name] = partial(_answer_turns, column=name)
    elif kind == "alpaca":
        answer = alpaca_answer(arguments)
        columns[arguments.messages_column] = lambda row: [*turns(row), _turn("assistant", row.get(answer))]
    else:
        columns[arguments.messages_column] = turns
    columns[arguments.tools_column] = partial(_tools, column=arguments.tools_column)
    if TEMPLATE_INPUTS in names:
        columns[TEMPLATE_INPUTS] = lambda row: row.get(TEMPLATE_INPUTS)
    return RowConverter(columns)


def _alpaca_turns(row: Values) -> list[JsonObject]:
    """Return the turns up to the question of an Alpaca row."""
    turns = [_turn("system", row["system"])] if row.get("system") else []
    for question, answer in row.get("history") or []:
        turns += [_turn("user", question), _turn("assistant", answer)]
    parts = [row.get("instruction"), row.get("input")]
    return [*turns, _turn("user", "\n".join(str(part) for part in parts if part))]


def _sharegpt_turns(row: Values, column: str) -> list[JsonObject]:
    parsed = [*map(_to_openai_turn, _require_turns(row.get(column), column))]
    has_system = any(turn["role"] == "system" for turn in parsed[:1])  # takes precedence over the column
    return [_turn("system", row["system"]), *parsed] if row.get("system") and not has_system else parsed


def _tools(row: Values, column: str) -> Tools | None:
    return as_functions(parse_tools(row.get(column), column))


def _turn(role: str, content: object) -> JsonObject:
    return {"role": role, "content": content}


def _answer_turns(row: Values, column: str) -> list[JsonObject]:
    """Return the turns of an answer given as text, as one turn, or as several."""
    answer = row[column]
    if isinstance(answer, str):
        return [_turn("assistant", answer)]
    turns = [answer] if isinstance(answer, dict) else _require_turns(answer, "the answer")
    return [*map(_to_openai_turn, turns)]


def _require_turns(turns: object, column: str) -> list[object]:
    if not isinstance(turns, list):
        raise McaError(f"{column} is {turns!r:.80}; expected a list of turns")
    return turns


def _to_openai_turn(turn: object) -> JsonObject:
    """Convert a turn with ``from`` and ``value``; turns with a role are returned unchanged."""
    if isinstance(turn, dict) and isinstance(turn.get("role"), str):
        return turn
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        raise McaError(f"a turn is {turn!r:.80}; expected 'from' and 'value', or 'role' and 'content'")
    role = _ROLES.get(str(turn["from"]))
    if role is None:
        raise McaError(f"a turn is from {turn['from']!r:.40}; expected one of {', '.join(_ROLES)}")
    weight = {"weight": turn["weight"]} if "weight" in turn else {}
    if turn["from"] == "function_call":
        return {**_turn(role, ""), "tool_calls": parse_calls(turn["value"]), **weight}
    return {**_turn(role, turn["value"]), **weight}
