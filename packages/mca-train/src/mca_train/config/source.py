"""Reading of the YAML file and the ``--key value`` overrides of a run."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.types import JsonObject
from mca_config.yaml_text import parse, parse_fields


def read_yaml(path: Path) -> JsonObject:
    """Return the mapping in ``path``.

    Raises:
        UsageError: The file is missing, cannot be read, is not YAML, or is not a mapping with string keys.
    """
    if path.is_dir():
        raise UsageError(f"configuration file {path} is a directory; name a YAML file")
    if not path.exists():
        raise UsageError(f"configuration file {path} does not exist")
    if not path.is_file():
        raise UsageError(
            f"configuration file {path} is a pipe or a device, but every rank reads it; name a file"
        )
    try:
        data = parse_fields(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path} must hold 'key: value' lines; its top level is {type(data).__name__}")
    return data


def parse_overrides(words: Sequence[str]) -> JsonObject:
    """Parse ``--key value``, ``--key=value``, ``--flag`` and ``--list a b`` to a mapping, with underscores for dashes.

    Raises:
        UsageError: A word is not part of any ``--key``.
    """
    found: dict[str, list[str]] = {}
    key = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            if key in found:
                raise UsageError(f"--{key} is given twice")
            found[key] = [value] if equals else []
        elif key is None:
            raise UsageError(f"unexpected argument '{word}'; overrides look like --key value")
        else:
            found[key].append(word)
    return {key: _scalar(values) for key, values in found.items()}


def _scalar(words: list[str]) -> object:
    if not words:
        return True
    values = [_read(word) for word in words]
    return values[0] if len(values) == 1 else values


def _read(word: str) -> object:
    """Parse ``word`` as YAML; return it unchanged if that fails (a path such as ``a: b`` or ``@x``)."""
    if ": " in word:
        return word
    try:
        return _mapping(word) if word.startswith("{") else parse_fields(word)
    except ValueError:
        return word


def _mapping(word: str) -> object:
    """Parse a mapping in braces, whose values have no declared type: ``1e-05``, as JSON writes it, is a number too."""
    found = parse(word)
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return found
