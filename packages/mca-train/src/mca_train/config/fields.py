"""Keys and values of a run become its dataclasses here; an unknown key is told which one looks most like it.

How a value takes the type of its field is `mca_config.fields`. Nothing here knows what a key is for.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from mca_config import fields
from mca_config.types import Typed, Values


def build(
    classes: Sequence[type],
    values: Values,
    *,
    where: str,
    only: Iterable[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Typed, ...]:
    """One instance of each of ``classes`` from ``values`` of a YAML file and the command line together.

    Args:
        classes: Dataclasses; a key that several have goes to all of them.
        values: Keys and values.
        where: What to name in an error.
        only: Names that must have a value although some class has a default for them.
        elsewhere: What to say of keys that have no meaning here but have one elsewhere.

    Raises:
        UsageError: Something is wrong: all that is.
    """

    def unknown(key: str, known: Iterable[str]) -> str:
        return f"{key}: {elsewhere[key]}" if key in elsewhere else f"unknown key '{key}'{nearest(key, known)}"

    return fields.build(classes, values, where=where, unknown=unknown, only=only)


def nearest(word: str, known: Iterable[str], otherwise: str = "mca-train sft --help lists the keys") -> str:
    """The end of an error about an unknown ``word``: the known one that looks most like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; {otherwise}"
