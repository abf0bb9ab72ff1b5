"""Rows in other programs' shapes become rows with the columns that are trained on here: Alpaca's and ShareGPT's.

    alpaca      instruction, input, output (or chosen, rejected); also system, history
    sharegpt    conversations of {"from": "human" | "gpt" | ..., "value": text}; also system, tools, chosen, rejected

OpenAI's messages with tools and TRL's shapes are read as they are. Of all shapes `chat_template_kwargs` is kept. What
a row means is decided in `encoding`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.data.tools import Tools, as_functions, calls_from, tools_from

COLUMNS = frozenset(
    {"instruction", "input", "output", "history", "system", "conversations", "conversation", "tools"}
)
"""Columns that these shapes are made of."""

TEMPLATE_INPUTS = "chat_template_kwargs"
"""Column of variables for the chat template, as TRL names it."""

_IMAGES = "images"
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
    return (named,) if vision is None or named != _IMAGES else (named, ONE_IMAGE)


def other_columns(vision: Values | None) -> tuple[str, ...]:
    """The columns of videos and sounds, by the same rule."""
    return OTHER_MEDIA[:2] if vision is None else OTHER_MEDIA


@dataclass(frozen=True)
class Converted:
    """Rows of another shape.

    Args:
        names: The columns that they have once they are converted.
        convert: Makes a row with these columns.
    """

    names: tuple[str, ...]
    convert: Callable[[Values], JsonObject]


def converted(names: Sequence[str], arguments: DataArguments, *, pairs: bool = False) -> Converted | None:
    """How rows with the columns ``names`` are converted; None: they are as they should be.

    ``data_format`` decides, or without it the columns: what can be read as it is, is.

    Args:
        names: Of the file.
        arguments: Columns, and the format if it is named.
        pairs: Whether a row has two answers.
    """
    found = _shape(names, arguments, pairs=pairs)
    if found is None or TEMPLATE_INPUTS not in names:
        return found
    return Converted(
        (*found.names, TEMPLATE_INPUTS),
        lambda row: {**found.convert(row), TEMPLATE_INPUTS: row.get(TEMPLATE_INPUTS)},
    )


def _shape(names: Sequence[str], arguments: DataArguments, *, pairs: bool) -> Converted | None:
    named, known = arguments.data_format, set(names)
    if named in ("messages", "prompt_completion", "text"):
        return None
    own = {arguments.messages_column} & known or {arguments.prompt_column} & known
    answers = ("chosen", "rejected") if pairs else ("output",)
    if named == "alpaca" or (named is None and not own and {"instruction", *answers} <= known):
        return _of_alpaca(arguments, pairs=pairs)
    column = next((name for name in ("conversations", "conversation") if name in known), None)
    if named == "sharegpt" or (named is None and not own and column is not None):
        return _of_sharegpt(column or "conversations", arguments, pairs=pairs)
    return None


def _of_alpaca(arguments: DataArguments, *, pairs: bool) -> Converted:
    def asked(row: Values) -> list[JsonObject]:
        turns = [_turn("system", row["system"])] if row.get("system") else []
        for question, answer in row.get("history") or []:
            turns += [_turn("user", question), _turn("assistant", answer)]
        parts = [row.get("instruction"), row.get("input")]
        return [*turns, _turn("user", "\n".join(str(part) for part in parts if part))]

    if pairs:
        return _pairs(arguments, lambda row: (asked(row), _said(row["chosen"]), _said(row["rejected"])))
    messages, tools = arguments.messages_column, arguments.tools_column
    return Converted(
        (messages, tools),
        lambda row: {
            messages: [*asked(row), _turn("assistant", row.get("output"))],
            tools: _tools(row),
        },
    )


def _of_sharegpt(column: str, arguments: DataArguments, *, pairs: bool) -> Converted:
    def turns(row: Values) -> list[JsonObject]:
        said = [*map(_shared, _listed(row.get(column), column))]
        has_system = any(turn["role"] == "system" for turn in said[:1])  # it stands for the column's
        return [_turn("system", row["system"]), *said] if row.get("system") and not has_system else said

    if pairs:
        return _pairs(arguments, lambda row: (turns(row), _said(row["chosen"]), _said(row["rejected"])))
    messages, tools = arguments.messages_column, arguments.tools_column
    return Converted((messages, tools), lambda row: {messages: turns(row), tools: _tools(row)})


def _pairs(
    arguments: DataArguments,
    split: Callable[[Values], tuple[list[JsonObject], list[JsonObject], list[JsonObject]]],
) -> Converted:
    names = tuple(getattr(arguments, f"{name}_column") for name in ("prompt", "chosen", "rejected"))
    tools = arguments.tools_column
    return Converted(
        (*names, tools), lambda row: {**dict(zip(names, split(row), strict=True)), tools: _tools(row)}
    )


def _tools(row: Values) -> Tools | None:
    return as_functions(tools_from(row.get("tools"), "tools"))


def _turn(role: str, content: object) -> JsonObject:
    return {"role": role, "content": content}


def _said(answer: object) -> list[JsonObject]:
    """An answer, as text, as one turn or as several."""
    if isinstance(answer, str):
        return [_turn("assistant", answer)]
    return [_shared(answer)] if isinstance(answer, dict) else [*map(_shared, _listed(answer, "the answer"))]


def _listed(turns: object, column: str) -> list[object]:
    if not isinstance(turns, list):
        raise McaError(f"{column} is {turns!r:.80}; expected a list of turns")
    return turns


def _shared(turn: object) -> JsonObject:
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
        return {**_turn(role, ""), "tool_calls": calls_from(turn["value"]), **weight}
    return {**_turn(role, turn["value"]), **weight}
