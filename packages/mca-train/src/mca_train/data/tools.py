"""Tools and tool calls of rows, in the form that chat templates expect.

Rows may have either as JSON text: OpenAI always uses it for arguments, and ShareGPT for whole calls. Nulls in
arguments that come from keys of other rows are removed.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed, Values

if TYPE_CHECKING:
    import datasets


Tools = list[JsonObject]


def parse_tools(found: object, column: str) -> Tools | None:
    """Parse a list of mappings, or its JSON text; None: there are no tools.

    Raises:
        McaError: The value has another type.
    """
    if isinstance(found, str) and found:
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise McaError(
                f"{column} is not valid JSON: {error}; write a list of tools, or its JSON"
            ) from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise McaError(f"{column} is {found!r:.80}; expected a list of mappings, or that as JSON text")
    return list(found)


def as_functions(tools: Tools | None) -> Tools | None:
    """Return ``tools`` in OpenAI's form, with bare function definitions wrapped."""
    if tools is None:
        return None
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


def parse_calls(text: object) -> list[JsonObject]:
    """Parse one or several ``{"name": ..., "arguments": ...}``, or their JSON text, into OpenAI's ``tool_calls``.

    Raises:
        McaError: The value has another type.
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
    """Return ``message`` with mappings as arguments of tool calls, which templates print as JSON or item by item.

    An empty list of calls is removed.

    Raises:
        McaError: The calls have another type.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    place = f"messages, turn {turn} ({message['role']})"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise McaError(f"{place}: tool_calls is {calls!r:.80}; expected a list of mappings")
    return {
        **message,
        "tool_calls": [_changed(call, lambda arguments: _mapping(arguments, place)) for call in calls],
    }


def with_arguments_as_text(message: JsonObject) -> JsonObject:
    """Return ``message`` with JSON text as arguments of tool calls, for templates that concatenate them."""
    if not message.get("tool_calls"):
        return message
    return {
        "content": "",
        **with_arguments(message, lambda arguments: json.dumps(arguments, ensure_ascii=False)),
    }


def with_arguments(message: JsonObject, change: Callable[[object], object]) -> JsonObject:
    """Return ``message`` with ``change`` applied to the arguments of each tool call."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed(call, change) for call in calls]} if calls else message


def _changed(call: JsonObject, change: Callable[[object], object]) -> JsonObject:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _changed(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def parse_mapping(value: object) -> JsonObject | None:
    """Parse a mapping, or its JSON text; None: the value has another type."""
    found = _parsed(value)
    return found if isinstance(found, dict) else None


def _mapping(arguments: object, place: str) -> JsonObject:
    is_nothing = arguments == "" or _parsed(arguments) is None
    found = {} if is_nothing else parse_mapping(arguments)
    if found is None:
        raise McaError(
            f"{place}: arguments of a call are {arguments!r:.80}; expected a mapping, or that as JSON text"
        )
    return found


def _parsed(value: object) -> object:
    """Return the value of JSON text; return other values and invalid JSON unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


_ARGUMENTS = "arguments"


def json_features(features: "datasets.Features | None") -> "datasets.Features | None":
    """Return ``features`` with arguments as JSON; None: no change is needed, or `datasets` does not support it."""
    import datasets

    if features is None or not hasattr(datasets, "Json") or not _struct_columns(features):
        return None
    return datasets.Features({name: _as_json(feature) for name, feature in features.items()})


def null_filter(features: Mapping[str, Typed] | None) -> Callable[[Values], JsonObject] | None:
    """Return the function that removes nulls of other rows' keys from arguments; None: there are no such columns."""
    columns = _struct_columns(features or {})

    def drop_nulls(row: Values) -> JsonObject:
        return {
            **row,
            **{name: _drop_nulls(row[name], columns[name]) for name in columns.keys() & row.keys()},
        }

    return drop_nulls if columns else None


def _struct_columns(features: Mapping[str, Typed]) -> dict[str, Typed]:
    """Return the columns with arguments as structs."""
    return {name: feature for name, feature in features.items() if _has_structs(feature)}


def _has_structs(feature: Typed) -> bool:
    if isinstance(feature, dict):
        return isinstance(feature.get(_ARGUMENTS), dict) or any(map(_has_structs, feature.values()))
    return (item := _item(feature)) is not None and _has_structs(item)


def _item(feature: Typed) -> Typed | None:
    """Return the feature of a list's items; None: the feature is not a list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _as_json(feature: Typed) -> Typed:
    import datasets

    if isinstance(feature, dict):
        return {
            key: datasets.Json() if key == _ARGUMENTS and isinstance(value, dict) else _as_json(value)
            for key, value in feature.items()
        }
    item = _item(feature) if _has_structs(feature) else None
    return feature if item is None else datasets.List(_as_json(item))


def _drop_nulls(value: Typed, feature: Typed, *, inside: bool = False) -> Typed:
    if isinstance(value, list) and (item := _item(feature)) is not None:
        return [_drop_nulls(each, item, inside=inside) for each in value]
    if not isinstance(value, dict) or not isinstance(feature, dict):
        return value
    return {
        key: _drop_nulls(each, feature.get(key), inside=inside or key == _ARGUMENTS)
        for key, each in value.items()
        if not (inside and each is None)
    }
