"""The YAML file and the ``--key value`` overrides become one mapping here.

Whether there are such keys, and what they mean, is decided in `fields`.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from mca_config.errors import UsageError
from mca_config.types import JsonObject, Typed


def read_yaml(path: Path) -> JsonObject:
    """The mapping in ``path``.

    Raises:
        UsageError: The file is missing, is not YAML, or is not a mapping with string keys.
    """
    if path.is_dir():
        raise UsageError(f"configuration file {path} is a directory; name a YAML file")
    if not path.is_file():
        raise UsageError(f"configuration file {path} does not exist")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path} must hold 'key: value' lines; its top level is {type(data).__name__}")
    return data


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Typed, Typed]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key.value}' is given twice", key.start_mark
                )
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def parse_overrides(words: Sequence[str]) -> JsonObject:
    """``--key value``, ``--key=value``, ``--flag`` and ``--list a b`` as a mapping; dashes are underscores.

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
    values = [yaml.safe_load(word) if _is_plain(word) else word for word in words]
    return values[0] if len(values) == 1 else values


def _is_plain(word: str) -> bool:
    """Whether YAML can read ``word`` as a value (a path such as ``a: b`` or ``@x`` cannot be one)."""
    try:
        yaml.safe_load(word)
    except yaml.YAMLError:
        return False
    return ": " not in word


def _one_line(error: Exception) -> str:
    text = str(error).replace('"<unicode string>", ', "")  # what PyYAML calls a text that was read before
    return " ".join(text.split()).removesuffix(" ^")
