"""Default column names, distinguishable from names that the user has set."""

from collections.abc import Iterable


class DefaultColumn(str):
    """Default name of a column, which rows may lack; a plain `str` is the user's, and its column must exist."""

    __slots__ = ()


def explicit_columns(arguments: object) -> frozenset[str]:
    """Return the keys of ``arguments`` with a column name that the user has set."""
    return frozenset(key for key, name in column_keys(arguments) if not isinstance(name, DefaultColumn))


def column_keys(arguments: object) -> Iterable[tuple[str, str]]:
    """Return the keys that name a column, with the names."""
    return [(key, name) for key, name in vars(arguments).items() if key.endswith("_column")]
