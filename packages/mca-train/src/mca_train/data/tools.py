"""Tools that a row names, and calls of them, in the form that chat templates are written for.

Rows may have either as JSON text: OpenAI's arguments of a call always are, and ShareGPT's calls as a whole.
"""

import json
from collections.abc import Callable

from mca_config.errors import McaError
from mca_config.types import JsonObject

Tools = list[JsonObject]


def parse_tools(found: object, column: str) -> Tools | None:
    """A list of mappings, or that as JSON text; None: there are none.

    Raises:
        McaError: It is something else.
    """
    if isinstance(found, str) and found:
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise McaError(f"{column} is not valid JSON: {error}") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise McaError(f"{column} is {found!r:.80}; expected a list of mappings, or that as JSON text")
    return list(found)


def as_functions(tools: Tools | None) -> Tools | None:
    """``tools`` of which those that are only a function's name and parameters say so, as OpenAI's do."""
    if tools is None:
        return None
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


def parse_calls(text: object) -> list[JsonObject]:
    """``{"name": ..., "arguments": ...}``, or several, as JSON text or as they are: OpenAI's ``tool_calls``.

    Raises:
        McaError: It is something else.
    """
    found = _parsed(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise McaError(
            f"a call of a function is {text!r:.80}; expected a mapping with 'name' and 'arguments', or a list of "
            "them, as JSON text"
        )
    return [{"type": "function", "function": call} for call in calls]


def with_parsed_arguments(message: JsonObject, turn: int) -> JsonObject:
    """``message`` whose calls have mappings as arguments: templates write them as JSON, or one by one.

    An empty list of calls is left out.

    Raises:
        McaError: They are something else.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    place = f"messages, turn {turn} ({message['role']})"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise McaError(f"{place}: tool_calls is {calls!r:.80}; expected a list of mappings")
    return {**message, "tool_calls": [_changed(call, lambda given: _mapping(given, place)) for call in calls]}


def with_arguments_as_text(message: JsonObject) -> JsonObject:
    """``message`` whose calls have JSON text as arguments, for templates that print them or add them to other text."""
    if not message.get("tool_calls"):
        return message
    return {"content": "", **with_arguments(message, lambda given: json.dumps(given, ensure_ascii=False))}


def with_arguments(message: JsonObject, change: Callable[[object], object]) -> JsonObject:
    """``message`` with what ``change`` makes of the arguments of each of its calls."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed(call, change) for call in calls]} if calls else message


def _changed(call: JsonObject, change: Callable[[object], object]) -> JsonObject:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _changed(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def parse_mapping(value: object) -> JsonObject | None:
    """A mapping, or that as JSON text; None: it is something else."""
    found = _parsed(value)
    return found if isinstance(found, dict) else None


def _mapping(given: object, place: str) -> JsonObject:
    is_nothing = given == "" or _parsed(given) is None
    found = {} if is_nothing else parse_mapping(given)
    if found is None:
        raise McaError(
            f"{place}: arguments of a call are {given!r:.80}; expected a mapping, or that as JSON text"
        )
    return found


def _parsed(value: object) -> object:
    """What JSON text says; anything else, and text that is no JSON, stays."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
