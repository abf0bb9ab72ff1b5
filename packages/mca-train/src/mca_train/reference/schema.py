"""JSON schema of a configuration file, for completion and checks in editors."""

import json
import typing
from collections.abc import Iterable

from mca_config.fields import TypeHint, alternatives, hint_origin, is_enum
from mca_config.types import JsonObject, Typed
from mca_train.reference.keys import REQUIRED, Key, task_keys
from mca_train.tasks.task import Task

_NAMES: dict[TypeHint, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
}


def schema(tasks: Iterable[Task]) -> JsonObject:
    """Return the schema of a file for any of ``tasks``."""
    tasks = tuple(tasks)
    keys: dict[str, Key] = {}
    for task in tasks:
        keys |= {key.name: key for key in task_keys(task)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"configuration of mca-train {' or '.join(task.name for task in tasks)}",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED),
        "properties": {name: _property(key) for name, key in keys.items()},
    }


def _property(key: Key) -> JsonObject:
    kinds = [kind for member in alternatives(key.hint) for kind in _kinds(member)]
    kinds = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    found: JsonObject = dict(kinds[0]) if len(kinds) == 1 else {"anyOf": kinds}
    if key.help:
        found["description"] = key.help
    if key.default not in (None, "", [], {}):
        default = getattr(key.default, "value", key.default)
        found["default"] = default if _is_json(default) else str(default)
    return found


def _kinds(member: TypeHint) -> list[JsonObject]:
    """Return the forms that a value of this type may have in a file."""
    if is_enum(member):
        values: list[Typed] = [choice.value for choice in member]
        return [{"enum": [*values, False] if "no" in values else values}]  # to YAML 1.1 a bare no is false
    if hint_origin(member) is typing.Literal:
        return [{"enum": list(typing.get_args(member))}]
    kind = hint_origin(member) or member
    if kind in (list, tuple):
        items = [form for one in alternatives((typing.get_args(member) or (str,))[0]) for form in _kinds(one)]
        return [*items, {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}]
    if kind is float:
        return [{"type": "number"}, {"type": "string", "pattern": r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$"}]
    return [{"type": _NAMES[kind]}] if kind in _NAMES else [{}]


def _is_json(value: Typed) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
