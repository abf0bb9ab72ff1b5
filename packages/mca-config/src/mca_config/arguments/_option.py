"""Declaration of arguments, and conversion of their values to the declared types."""

from dataclasses import field
from typing import get_args, get_type_hints

from mca_config.fields import cast
from mca_config.types import Typed


def option(help: str, default: Typed = None) -> Typed:
    """Return a dataclass field with a help text; None means the value of the checkpoint, or Megatron's default."""
    return field(default=default, metadata={"help": help})


def switch(help: str) -> Typed:
    """Return the field of an optional bool: ``--name`` alone means true, ``--name false`` false, absence None."""
    return field(default=None, metadata={"help": help, "nargs": "?", "const": True})


def coerce_options(args: object, cls: type) -> None:
    """Convert the fields that ``cls`` itself declares to their types, or raise an error that names the field.

    YAML reads ``1e-4`` as a string, so a string with a number is converted for a float field.
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
