"""Base class of the configuration's sections, with the ranges of their numbers.

A file with a number out of range is damaged, and planning its model would use all memory.
"""

import dataclasses
import math
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Protocol, TypeVar, cast

from mca_config.errors import McaError
from mca_config.fields import hint_origin
from mca_config.types import Typed, Values

LARGEST = 1 << 22
"""Largest width and largest vocabulary."""
LAYERS = 1 << 12
"""Most layers."""
LARGEST_MATRIX = 1 << 36
"""Largest number of elements of one weight; the embedding of a large model has 2 ** 32."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Allowed values of a number, as metadata of a field's type; None and other values that are no numbers pass."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def problem(self, name: str, value: Typed) -> str | None:
        """Return the error about ``value`` of field ``name``; None: it is in range."""
        if self.least <= value <= self.most and self.above < value < self.below:
            return None
        if self.below < math.inf:
            return f"{name} must be at least {self.least:g} and below {self.below:g}, not {value!r:.80}"
        if value <= self.above:
            return f"{name} must be above {self.above:g}, not {value!r:.80}"
        bound = f"at least {self.least}" if value < self.least else f"at most {self.most}"
        return f"{name} must be {bound}, not {value!r:.80}"


Width = Annotated[int, Range(least=1, most=LARGEST)]
"""A size of weights."""
Heads = Annotated[int, Range(least=1, most=1 << 12)]
Layers = Annotated[int, Range(least=1, most=LAYERS)]
Experts = Annotated[int, Range(least=1, most=1 << 16)]
Positions = Annotated[int, Range(least=1, most=1 << 40)]
Positive = Annotated[float, Range(above=0.0)]
NotNegative = Annotated[float, Range(least=0.0)]
Share = Annotated[float, Range(least=0, below=1)]


class ModelSizes(Protocol):
    """The sizes of a model that sections are checked against."""

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def layer_types(self) -> tuple[str, ...] | None:
        """Type of each decoder layer."""

    @property
    def rotated_channels(self) -> int:
        """Channels of a query or key head that RoPE rotates."""


class Section:
    """Fields of one feature of a model, under Megatron's names, with their checks."""

    def __post_init__(self) -> None:
        require_numbers(self)

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield contradictions between fields, which may be in other sections of ``model``."""
        return iter(())


S = TypeVar("S", bound=Section)


def given(section: S | None) -> S:
    """Return ``section`` in code that only models with it run."""
    assert section is not None, "the model has no such section"
    return section


def require_numbers(instance: Typed) -> None:
    """Check that numeric fields of a dataclass instance are numbers and in range.

    Raises:
        McaError: For a value that is not a number, such as ``"4"`` in a ``config.json``, or with all values that are
            out of range.
    """
    types = numeric_fields(type(instance))
    for name, (kinds, _) in types.items():
        value = getattr(instance, name)
        if isinstance(value, str | list | tuple | dict):
            raise McaError(f"{name} must be a number, not {value!r:.80}; correct the model's config.json")
        if kinds == {int} and isinstance(value, float | bool):
            raise McaError(f"{name} must be a whole number, not {value!r}; correct the model's config.json")
    if problems := list(range_problems({name: getattr(instance, name) for name in types}, types)):
        raise McaError("; ".join(problems))


NumericFields = Mapping[str, tuple[frozenset[type], Range]]
"""Number types and range of each numeric field."""


def range_problems(
    values: Values, types: NumericFields, keys: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield an error for each of ``values`` that is out of its field's range or not finite.

    Args:
        values: The values by field.
        types: Number types and range of each field.
        keys: Other names for fields in the errors.
    """
    for name, (_, bounds) in types.items():
        value = values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        key = keys.get(name, name)
        if not math.isfinite(value):
            yield f"{key} must be a finite number, not {value}"
        elif problem := bounds.problem(key, value):
            yield problem


def numeric_fields(cls: type) -> NumericFields:
    """Return the number types and the range of each numeric field of dataclass ``cls``."""
    return _numeric_fields(cast(Hashable, cls))


@cache
def _numeric_fields(cls: Hashable) -> NumericFields:
    found = {}
    for entry in dataclasses.fields(cast(Typed, cls)):
        kinds: set[type] = set()
        bounds = Range()
        for member in _union_members(entry.type):
            if hint_origin(member) is Annotated:
                member, bounds = typing.get_args(member)
            kinds |= {member}
        if kinds and kinds <= {int, float}:
            found[entry.name] = frozenset(kinds), bounds
    return found


def _union_members(hint: Typed) -> list[Typed]:
    """Return the members of a field's type without None."""
    members = [hint] if hint_origin(hint) is Annotated else typing.get_args(hint) or [hint]
    return [member for member in members if member is not type(None)]


def require_factors(name: str, factors: tuple[float, ...] | None, count: int) -> Iterator[str]:
    """Yield an error if ``factors`` are not ``count`` finite numbers."""
    finite = all(isinstance(factor, int | float) and math.isfinite(factor) for factor in factors or ())
    if factors is not None and (len(factors) != count or not finite):
        yield f"{name} must be {count} finite numbers, not {factors!r:.80}"


def require_entries(name: str, entries: tuple[object, ...] | None, layers: int) -> Iterator[str]:
    """Yield an error if a list with one entry for each layer has another length."""
    if entries is not None and len(entries) != layers:
        yield f"{name} has {len(entries)} entries, expected num_layers {layers}"


def require_matrix(rows: tuple[str, int], columns: tuple[str, int | None]) -> Iterator[str]:
    """Yield an error if a weight of these named sizes is too large."""
    if rows[1] * (columns[1] or 0) > LARGEST_MATRIX:
        yield f"{rows[0]} {rows[1]} times {columns[0]} {columns[1]} must be at most {LARGEST_MATRIX}"
