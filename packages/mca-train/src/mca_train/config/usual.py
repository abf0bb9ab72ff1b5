"""`Usual` is what a column is called where nobody says what it is called, so that names that were given are known."""

from collections.abc import Iterable


class Usual(str):
    """A name of a column that is read if rows have it; any other text was given, and what it names must be read."""

    __slots__ = ()


def given_columns(arguments: object) -> frozenset[str]:
    """The keys of ``arguments`` for which a name was given."""
    return frozenset(key for key, name in column_keys(arguments) if not isinstance(name, Usual))


def column_keys(arguments: object) -> Iterable[tuple[str, str]]:
    """The keys that name a column, and the names."""
    return [(key, name) for key, name in vars(arguments).items() if key.endswith("_column")]
