"""Keys and values of a configuration file and of the command line, and their conversion to dataclasses.

Nothing here imports torch. `mca_config.fields` converts values to the types of fields.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mca_config import fields, yaml_text
from mca_config.errors import UsageError
from mca_config.suggestions import suggestion
from mca_config.types import JsonObject, Typed, Values
from mca_models.hub import Needed, is_hub_id, resolve_directory

_DIRECTORIES: Mapping[str, Needed] = {
    "model_name_or_path": "all",
    "reference_model_name_or_path": "all",
    "adapter_name_or_path": "all",
    "tokenizer_name_or_path": "tokenizer",
}
"""Keys with a directory or the id of a Hub model, and the files of the model that they need."""


def load_values(config: Path | None, overrides: list[str]) -> tuple[JsonObject, str]:
    """Return the file's values, overridden by the command line's, and the name of the two in an error."""
    words = parse_overrides(overrides)
    if config is None:
        return words, "the command line"
    return read_yaml(config) | words, f"{config}{' and the command line' if words else ''}"


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
        data = yaml_text.parse_fields(path.read_text(encoding="utf-8"))
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
        return _mapping(word) if word.startswith("{") else yaml_text.parse_fields(word)
    except ValueError:
        return word


def _mapping(word: str) -> object:
    """Parse a mapping in braces, whose values have no declared type: ``1e-05``, as JSON writes it, is a number too."""
    found = yaml_text.parse(word)
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return found


def has_hub_ids(values: Values) -> bool:
    """Return True if a value is the id of a Hub model."""
    return any(isinstance(values.get(key), str) and is_hub_id(values[key]) for key in _DIRECTORIES)


def with_directories(values: Values, *, only: Needed = "all") -> JsonObject:
    """Return ``values`` with local directories for Hub ids.

    Args:
        values: Values of a configuration.
        only: Files of models to download; with ``config`` the ids of tokenizers are kept.

    Raises:
        UsageError: The Hub has no such model, denies access, or cannot be reached.
    """
    result = dict(values)
    for key, needed in _DIRECTORIES.items():
        name = values.get(key)
        if not isinstance(name, str) or not is_hub_id(name) or (only == "config" and needed == "tokenizer"):
            continue
        try:
            result[key] = str(resolve_directory(name, needed if only == "all" else only))
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from error
    return result


def build(
    classes: Sequence[type],
    values: Values,
    *,
    where: str,
    otherwise: str,
    only: Iterable[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    flags: Iterable[str] = (),
) -> tuple[Typed, ...]:
    """Return one instance of each of ``classes`` from ``values`` of a YAML file and the command line.

    Args:
        classes: Dataclasses; a key that several classes have is passed to all of them.
        values: Keys and values.
        where: Origin of the values for error messages.
        otherwise: Text about an unknown key that is similar to no other.
        only: Names that need a value although a class has a default for them.
        elsewhere: Messages about keys that are known from other kinds of run or programs.
        flags: Names of the command's flags that are not keys, for suggestions.

    Raises:
        UsageError: All problems of keys and values.
    """

    def unknown(key: str, known: Iterable[str]) -> str:
        if key in elsewhere:
            return f"{key}: {elsewhere[key]}"
        words = [*known, *(f"--{flag}" for flag in flags)]
        return f"unknown key '{key}'{suggestion(key, words, otherwise)}"

    return fields.build(classes, values, where=where, unknown=unknown, only=only)
