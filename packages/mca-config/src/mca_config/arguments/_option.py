"""How an argument is declared and how its value is brought to the declared type.

Which options there are is said in `options`.
"""

from dataclasses import field
from typing import get_args, get_type_hints

from mca_config.fields import cast
from mca_config.types import Typed


def option(help: str, default: Typed = None) -> Typed:
    """A dataclass field with a help text; None stands for what the checkpoint (or Megatron) says."""
    return field(default=default, metadata={"help": help})


def switch(help: str) -> Typed:
    """An optional bool: ``--name`` alone means true, ``--name false`` false, absence None."""
    return field(default=None, metadata={"help": help, "nargs": "?", "const": True})


def coerce_options(args: object, cls: type) -> None:
    """Brings the fields that ``cls`` itself declares to their types, or raises naming the field.

    YAML reads ``1e-4`` as a string, so that a string which spells a number is taken as one where a
    number is declared.
    """
    hints = get_type_hints(cls)
    for name in cls.__annotations__:
        value = getattr(args, name)
        if isinstance(value, str) and float in get_args(hints[name]):
            value = _number(value)
        setattr(args, name, cast(name, value, hints[name], words=False))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
