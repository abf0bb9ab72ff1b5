"""Rows in other programs' shapes become rows with the columns that are trained on here: Alpaca's and ShareGPT's.

    alpaca      instruction, input, output (or chosen, rejected); also system, history
    sharegpt    conversations of {"from": "human" | "gpt" | ..., "value": text}; also system, tools, chosen, rejected

OpenAI's messages with tools and TRL's shapes are read as they are. Of all shapes `chat_template_kwargs` is kept. The
answers and the tools stand in columns of other names if these were given. Which shape rows have is decided in
`row_formats`, what a row means in `encoding`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.config.columns import PairArguments
from mca_train.config.default_column import DefaultColumn
from mca_train.data.row_formats import alpaca_answer, conversation_in, detect_format, detect_pair_format
from mca_train.data.tools import Tools, as_functions, parse_calls, parse_tools

COLUMNS = frozenset(
    {"instruction", "input", "output", "history", "system", "conversations", "conversation", "tools"}
)
"""Columns that these shapes are made of."""

TEMPLATE_INPUTS = "chat_template_kwargs"
"""Column of variables for the chat template, as TRL names it."""

ONE_IMAGE = "image"
"""Column of one image, in LLaVA's rows and in TRL's."""

OTHER_MEDIA = ("videos", "audios", "video", "audio")
"""Columns of what no model is given: of other programs' rows, the first two, and of LLaVA's."""

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


def image_columns(vision: Values | None, arguments: DataArguments) -> tuple[str, ...]:
    """The columns that may hold a row's images: the one that is named; else, for a model that sees, `image` too.

    Args:
        vision: Of the model's configuration; None: it sees no images.
        arguments: Columns.
    """
    named = arguments.images_column
    return (named, ONE_IMAGE) if vision is not None and isinstance(named, DefaultColumn) else (named,)


def media_columns(vision: Values | None) -> tuple[str, ...]:
    """The columns of videos and sounds, by the same rule."""
    return OTHER_MEDIA[:2] if vision is None else OTHER_MEDIA


@dataclass(frozen=True)
class RowConverter:
    """Rows of another shape.

    Args:
        names: The columns that they have once they are converted.
        convert: Makes a row with these columns.
    """

    names: tuple[str, ...]
    convert: Callable[[Values], JsonObject]


def row_converter(
    names: Sequence[str], arguments: DataArguments, key: str, *, pairs: bool = False
) -> RowConverter | None:
    """How rows with the columns ``names`` are converted; None: they are as they should be.

    Args:
        names: Of the file.
        arguments: Columns, and the format if it is named.
        key: The argument that named the files, for errors.
        pairs: Whether a row has two answers.

    Raises:
        UsageError: No format is known that has these columns, with those that were given a name.
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
        said = [*map(_to_openai_turn, _require_turns(row.get(column), column))]
        has_system = any(turn["role"] == "system" for turn in said[:1])  # it stands for the column's
        return [_turn("system", row["system"]), *said] if row.get("system") and not has_system else said

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
    """An answer, as text, as one turn or as several."""
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
    """A turn with ``from`` and ``value``; one that has a role already stays as it is."""
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
