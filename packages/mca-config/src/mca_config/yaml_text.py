"""YAML reader for all files of users: no duplicate keys, and one-line errors.

It needs pyyaml, which the extra ``training`` installs.
"""

import math
from collections.abc import Callable

import yaml

from mca_config.types import Typed

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SWITCH, _DATE, _TEXT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "timestamp", "str"))


class _Loader(yaml.SafeLoader):
    """Safe loader that raises an error for duplicate keys, reads dates as text, and quotes no line in errors.

    A quoted line could show a token.
    """

    def get_mark(self) -> yaml.Mark:
        return yaml.Mark(self.name, self.index, self.line, self.column, None, 0)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Typed, Typed]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(
                    key, "a key is a list or a mapping, not a word; quote the text with {{ }} or [ ]"
                )
            if key.value in seen:
                raise _error(key, f"key '{key.value}' is given twice")
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse(text: str) -> Typed:
    """Parse the YAML in ``text``.

    Raises:
        ValueError: The YAML is not valid; the message is one line.
    """
    return _read(text, lambda node: None)


def parse_fields(text: str) -> Typed:
    """Parse YAML whose values are converted to the types of their fields later.

    Words that YAML 1.1 reads as a number or bool, but that are not its usual spelling (``0123``, ``2024_11_23``,
    ``1.10``, ``on``), stay text, because a text field needs that spelling. In a nested mapping, which has no declared
    types, YAML 1.1 decides.

    Raises:
        ValueError: The YAML is not valid; the message is one line.
    """
    return _read(text, _keep_words)


def _read(text: str, change: Callable[[yaml.Node], None]) -> Typed:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            change(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        message = str(error).replace('"<unicode string>", ', "")  # PyYAML's name for text that is not a file
        fix = "; replace the tab with spaces" if "'\\t'" in message else ""
        raise ValueError(" ".join(message.split()) + fix) from error


def _keep_words(node: yaml.Node) -> None:
    """Mark such words as text: the document itself, the values of its keys and the entries of its lists."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and not _is_canonical(node):
            node.tag = _TEXT
        return
    entries = node.value
    if isinstance(node, yaml.MappingNode):
        entries = [value for _, value in node.value if not isinstance(value, yaml.MappingNode)]
    for entry in entries:
        _keep_words(entry)


def _is_canonical(node: yaml.ScalarNode) -> bool:
    if node.tag == _SWITCH:
        return node.value.lower() in ("true", "false")
    if node.tag not in _NUMBERS:
        return True
    number = yaml.safe_load(node.value)
    return str(number) == node.value or not math.isfinite(number)
