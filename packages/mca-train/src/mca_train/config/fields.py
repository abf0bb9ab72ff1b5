"""Construction of a run's dataclasses from keys and values, with a suggestion for unknown keys.

`mca_config.fields` converts values to the types of fields.
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
