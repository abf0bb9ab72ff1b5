"""``additional_configs``: Megatron settings without a declared argument, checked by name without importing Megatron.

`_unsupported_settings` lists the settings that have an effect in mca.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from mca_config import _megatron_keys as keys
from mca_config.arguments._unsupported_settings import is_off, unsupported_reason
from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed

_NAME = "additional_configs"


def read(value: JsonObject | str | None) -> JsonObject | None:
    """Return the settings from a dict, inline JSON, or the path of a file."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_text(value)
    if not isinstance(value, dict):
        raise McaError(f"{_NAME} must be an object of settings, not {value!r}")
    return dict(value)


def _parse_text(text: str) -> Typed:
    if text.lstrip().startswith("{"):
        return _parse_json(text, _NAME)
    path = Path(text)
    if not path.is_file():
        raise McaError(f"{_NAME}: {text!r} is neither inline JSON nor an existing file; give one of the two")
    contents = path.read_text(encoding="utf-8")
    return (
        _parse_yaml(contents, path)
        if path.suffix in (".yaml", ".yml")
        else _parse_json(contents, f"{_NAME}: {path}")
    )


def _parse_json(text: str, where: str) -> Typed:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise McaError(f"{where}: not valid JSON: {error}") from error


def _parse_yaml(text: str, path: Path) -> Typed:
    try:
        from mca_config.yaml_text import parse
    except ImportError as error:
        raise McaError(
            f"{_NAME}: reading {path} needs pyyaml; install it or write the file as JSON"
        ) from error
    try:
        return parse(text)
    except ValueError as error:
        raise McaError(f"{_NAME}: {path} is not valid YAML: {error}") from error


def move_to_arguments(args: Any, settings: JsonObject | None) -> None:
    """Check the names in ``settings``, and move those with a declared argument to ``args``.

    Null values are removed, and so are unsupported settings that are off.
    """
    if not settings:
        return
    declared = {field.name for field in dataclasses.fields(args)} - {_NAME}
    known = settable_keys()
    for name in list(settings):
        if name in keys.ARCHITECTURE:
            raise McaError(
                f"{_NAME}: {name} belongs to the model, not to its computation; remove it (the checkpoint's "
                "config.json says what the weights mean)"
            )
        if name not in declared and name not in known:
            raise McaError(
                f"{_NAME}: unknown key {name}{_suggestion(name, known | declared)}; rename or remove it"
            )
        if name not in declared:
            value = settings[name]
            if value is None or (unsupported_reason(name) and is_off(name, value)):
                del settings[name]
            continue
        value = settings.pop(name)
        if getattr(args, name) not in (None, value):
            raise McaError(
                f"{_NAME}: {name} is {value!r}, but the argument {name} is {getattr(args, name)!r}; remove one"
            )
        setattr(args, name, value)


def settable_keys() -> frozenset[str]:
    """Return the settings of the installed megatron-core, or of all supported versions if none is installed."""
    from importlib import metadata  # slow to import, rarely needed

    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = ""
    only = {"0.16": keys.ONLY_0_16, "0.19": keys.ONLY_0_19}
    return keys.COMMON | only.get(".".join(version.split(".")[:2]), keys.ONLY_0_16 | keys.ONLY_0_19)


def _suggestion(name: str, known: frozenset[str]) -> str:
    from difflib import get_close_matches  # a correct setting needs none

    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
