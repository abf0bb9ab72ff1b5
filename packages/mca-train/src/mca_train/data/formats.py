"""Conversion of Alpaca and ShareGPT rows to chat messages.

    alpaca      instruction, input, output (or chosen, rejected); also system, history
    sharegpt    conversations of {"from": "human" | "gpt" | ..., "value": text}; also system, tools, chosen, rejected

OpenAI messages with tools and TRL formats need no conversion. `chat_template_kwargs` is kept in all formats. Answers
and tools may be in renamed columns. `row_formats` detects the format, and `encoding` interprets the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, DefaultColumn, PairArguments
from mca_train.data.message_parts import MEDIA
from mca_train.data.row_formats import alpaca_answer, conversation_in, detect_format, detect_pair_format
from mca_train.data.tools import Tools, as_functions, parse_calls, parse_tools

COLUMNS = frozenset(
    {"instruction", "input", "output", "history", "system", "conversations", "conversation", "tools"}
)
"""Columns of Alpaca and ShareGPT rows."""

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
        names: Columns after the conversion.
        convert: Function that converts a row.
    """

    names: tuple[str, ...]
    convert: Callable[[Values], JsonObject]


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
    kind = (
        detect_pair_format(names, cast("PairArguments", arguments), key)
        if pairs
        else detect_format(names, arguments, key)
    )
    if kind not in ("alpaca", "sharegpt"):
        return None
    column = conversation_in(names)
    found = (
        _alpaca_converter(arguments, pairs=pairs)
        if kind == "alpaca"
        else _sharegpt_converter(column, arguments, pairs=pairs)
    )
    if TEMPLATE_INPUTS not in names:
        return found
    return RowConverter(
        (*found.names, TEMPLATE_INPUTS),
        lambda row: {**found.convert(row), TEMPLATE_INPUTS: row.get(TEMPLATE_INPUTS)},
    )


def _alpaca_converter(arguments: DataArguments, *, pairs: bool) -> RowConverter:
    def prompt_turns(row: Values) -> list[JsonObject]:
        turns = [_turn("system", row["system"])] if row.get("system") else []
        for question, answer in row.get("history") or []:
            turns += [_turn("user", question), _turn("assistant", answer)]
        parts = [row.get("instruction"), row.get("input")]
        return [*turns, _turn("user", "\n".join(str(part) for part in parts if part))]

    if pairs:
        return _pair_converter(arguments, prompt_turns)
    messages, tools, answer = arguments.messages_column, arguments.tools_column, alpaca_answer(arguments)
    return RowConverter(
        (messages, tools),
        lambda row: {
            messages: [*prompt_turns(row), _turn("assistant", row.get(answer))],
            tools: _tools(row, tools),
        },
    )


def _sharegpt_converter(column: str, arguments: DataArguments, *, pairs: bool) -> RowConverter:
    def turns(row: Values) -> list[JsonObject]:
        parsed = [*map(_to_openai_turn, _require_turns(row.get(column), column))]
        has_system = any(turn["role"] == "system" for turn in parsed[:1])  # takes precedence over the column
        return [_turn("system", row["system"]), *parsed] if row.get("system") and not has_system else parsed

    if pairs:
        return _pair_converter(arguments, turns)
    messages, tools = arguments.messages_column, arguments.tools_column
    return RowConverter((messages, tools), lambda row: {messages: turns(row), tools: _tools(row, tools)})


def _pair_converter(
    arguments: DataArguments, prompt_turns: Callable[[Values], list[JsonObject]]
) -> RowConverter:
    own = cast("PairArguments", arguments)
    prompt, answers, tools = own.prompt_column, (own.chosen_column, own.rejected_column), own.tools_column
    return RowConverter(
        (prompt, *answers, tools),
        lambda row: {
            prompt: prompt_turns(row),
            **{name: _answer_turns(row[name]) for name in answers},
            tools: _tools(row, tools),
        },
    )


def _tools(row: Values, column: str) -> Tools | None:
    return as_functions(parse_tools(row.get(column), column))


def _turn(role: str, content: object) -> JsonObject:
    return {"role": role, "content": content}


def _answer_turns(answer: object) -> list[JsonObject]:
    """Return the turns of an answer given as text, as one turn, or as several."""
    if isinstance(answer, str):
        return [_turn("assistant", answer)]
    return (
        [_to_openai_turn(answer)]
        if isinstance(answer, dict)
        else [*map(_to_openai_turn, _require_turns(answer, "the answer"))]
    )


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
