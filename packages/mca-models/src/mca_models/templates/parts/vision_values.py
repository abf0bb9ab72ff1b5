"""Typed values of a vision model's configuration, read by key.

A value of another type raises an error that names its key.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed, Values

_LARGEST = 1 << 22
"""Largest width, or side of an image."""
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True)
class VisionValues:
    """The values of one object of ``config.json``.

    Args:
        values: Values of the object; the caller gives the default of an absent key.
        inside: What names the object before its keys, where it is not the whole file.
    """

    values: Values
    inside: str = ""

    def size(self, key: str, default: int) -> int:
        """A width, or a count of channels or pixels."""
        return int(self._value(key, default, _is_size, f"a whole number from 1 to {_LARGEST}"))

    def layers(self, key: str, default: int) -> int:
        """Return a number of layers."""
        wanted = f"a whole number from 1 to {_MOST_LAYERS}"
        return int(self._value(key, default, lambda value: _is_size(value, _MOST_LAYERS), wanted))

    def sides(self, key: str, default: int | tuple[int, int]) -> tuple[int, int]:
        """Height and width: two sizes, or one for both."""
        wanted = f"a whole number from 1 to {_LARGEST}, or two in a list"
        value = self._value(key, default, lambda value: _is_size(value) or _are_two_sizes(value), wanted)
        return (value, value) if isinstance(value, int) else (value[0], value[1])

    def pairs(self, key: str, default: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return heights and widths in a list."""
        wanted = f"a list of pairs of whole numbers from 1 to {_LARGEST}"
        pairs = self._value(key, list(default), _are_pairs, wanted)
        return [(int(height), int(width)) for height, width in pairs]

    def factor(self, key: str, default: float) -> float:
        """Return a factor of a size."""
        wanted = f"a number above 0 and up to {_LARGEST}"
        return float(self._value(key, default, _is_factor, wanted))

    def flag(self, key: str, default: bool) -> bool:
        """Return whether something is there."""
        return bool(self._value(key, default, lambda value: value in (True, False, None), "true or false"))

    def indexes(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of layers."""
        return tuple(self._value(key, default, _are_indexes, "a list of whole numbers"))

    def index_or_more(self, key: str, default: int | tuple[int, ...]) -> tuple[int, ...]:
        """The number of a layer, or those of several."""
        wanted = "a whole number, or some in a list"
        value = self._value(
            key, default, lambda value: type(value) is int or _are_some_indexes(value), wanted
        )
        return (value,) if isinstance(value, int) else tuple(value)

    def kinds(self, key: str, default: Sequence[str], *known: str) -> tuple[str, ...]:
        """Return the kind of each layer, one of ``known``; ``default`` gives the number of layers."""

        def fits(value: Typed) -> bool:
            listed = isinstance(value, list | tuple) and len(value) == len(default)
            return value is None or (listed and all(each in known for each in value))

        wanted = f"a list of {len(default)} words, each {' or '.join(map(repr, known))}"
        return tuple(self._value(key, default, fits, wanted) or default)

    def choice(self, key: str, *known: str) -> str:
        """One of the words that are ``known``, of which the first is the default."""
        return str(self._value(key, known[0], lambda value: value in known, " or ".join(map(repr, known))))

    def _value(self, key: str, default: Typed, fits: Callable[[Typed], bool], wanted: str) -> Typed:
        value = self.values.get(key, default)
        if not fits(value):
            raise McaError(f"'{self.inside}{key}' of config.json is {value!r:.80}; expected {wanted}")
        return value


def vision_values(config: McaModelConfig, tower: str = "vision_config") -> tuple[VisionValues, VisionValues]:
    """Return the values outside of a tower's configuration, and those inside.

    Args:
        config: Model configuration.
        tower: Key of the tower's configuration.

    Raises:
        McaError: ``config`` has none.
    """
    about = config.vision_fields or {}
    inside = about.get(tower)
    if not isinstance(inside, dict):
        raise McaError(
            f"'{tower}' must be an object, not {inside!r:.80}; a {config.model_type} model needs it"
        )
    return VisionValues(about), VisionValues(inside, f"{tower}.")


def audio_values(config: McaModelConfig) -> VisionValues | None:
    """Return the values of the audio tower's configuration; None: the model has no audio tower.

    Raises:
        McaError: It is not an object.
    """
    audio = (config.vision_fields or {}).get("audio_config")
    if audio is None:
        return None
    if not isinstance(audio, dict):
        raise McaError(f"'audio_config' must be an object or null, not {audio!r:.80}")
    return VisionValues(audio, "audio_config.")


def _is_size(value: Typed, most: int = _LARGEST) -> bool:
    return type(value) is int and 1 <= value <= most


def _are_two_sizes(value: Typed) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value))


def _are_pairs(value: Typed) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_are_two_sizes, value))


def _is_factor(value: Typed) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 < value <= _LARGEST


def _are_indexes(value: Typed) -> bool:
    return isinstance(value, list | tuple) and all(type(each) is int for each in value)


def _are_some_indexes(value: Typed) -> bool:
    return bool(value) and _are_indexes(value)
