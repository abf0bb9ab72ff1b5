"""Keys and values of a run become its dataclasses here; the error about an unknown key names the one that it resembles.

How a value takes the type of its field is `mca_config.fields`. Nothing here knows what a key is for.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from mca_config import fields
from mca_config.suggestions import suggestion
from mca_config.types import Typed, Values


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
    """One instance of each of ``classes`` from ``values`` of a YAML file and the command line together.

    Args:
        classes: Dataclasses; a key that several have goes to all of them.
        values: Keys and values.
        where: What to name in an error.
        otherwise: What to say of an unknown key that resembles no other.
        only: Names that must have a value although some class has a default for them.
        elsewhere: What to say of keys that have no meaning here but have one elsewhere.
        flags: Names of the command's flags that are no keys, one of which can be meant by an unknown key.

    Raises:
        UsageError: Something is wrong: all that is.
    """

    def unknown(key: str, known: Iterable[str]) -> str:
        if key in elsewhere:
            return f"{key}: {elsewhere[key]}"
        words = [*known, *(f"--{flag}" for flag in flags)]
        return f"unknown key '{key}'{suggestion(key, words, otherwise)}"

    return fields.build(classes, values, where=where, unknown=unknown, only=only)
