"""Layouts: invertible arrangements of parts inside stored tensors.

    stored tensors --unpack--> parts --pack--> stored tensors

A layout knows no rank and no file; both directions are pure and each is the other's exact inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from mca_models.weights.arrays import Array, concat, split, split_ratio, swap_axes


class Layout(Protocol):
    """An invertible arrangement of parts inside stored tensors."""

    def __hash__(self) -> int:
        """Layouts are values, equal when they arrange alike."""

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """The stored tensors that hold ``parts``."""

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """The parts inside ``stored``."""


@dataclass(frozen=True)
class Separate:
    """Each part is its own tensor."""

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        return tuple(parts)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        return tuple(stored)


SEPARATE = Separate()


@dataclass(frozen=True)
class Concat:
    """Parts one after the other on axis 0, their lengths in the proportion ``ratio``."""

    ratio: tuple[int, ...]

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        return (concat(parts, 0),)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        (x,) = stored
        divisor = gcd(*self.ratio)
        return split_ratio(x, 0, tuple(r // divisor for r in self.ratio))


@dataclass(frozen=True)
class GroupedHeads:
    """Rows regrouped by query group, ``[q..q k v] [q..q k v] ...``, for weights and biases alike.

    Args:
        heads: How many heads each part has in one group, e.g. ``(4, 1, 1)`` for q, k, v.
        head_dim: Rows of one head; 1 where the parts of a group have heads of different sizes, and for
            rows that alternate: ``((1, 1), 1)`` is [gate 0, up 0, gate 1, up 1, ...].
    """

    heads: tuple[int, ...]
    head_dim: int

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        rest = tuple(parts[0].shape[1:])
        grouped = [
            part.reshape((-1, n * self.head_dim, *rest)) for part, n in zip(parts, self.heads, strict=True)
        ]
        return (concat(grouped, 1).reshape((-1, *rest)),)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        (x,) = stored
        rest = tuple(x.shape[1:])
        sizes = [n * self.head_dim for n in self.heads]
        parts = split(x.reshape((-1, sum(sizes), *rest)), 1, sizes)
        return tuple(part.reshape((-1, *rest)) for part in parts)


@dataclass(frozen=True)
class Transposed:
    """Stored tensors with their last two axes exchanged, e.g. ``[in, out]`` for ``[out, in]``.

    Args:
        inside: How the parts lie in the tensors once turned.
    """

    inside: Layout = SEPARATE

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        return tuple(swap_axes(x) for x in self.inside.pack(parts))

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        return self.inside.unpack([swap_axes(x) for x in stored])


@dataclass(frozen=True)
class SwappedHalves:
    """Rows with their halves swapped: a linear on two concatenated inputs, in the other order."""

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        return tuple(concat(split_ratio(x, 1, (1, 1))[::-1], 1) for x in parts)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        return self.pack(stored)


@dataclass(frozen=True)
class Shaped:
    """Vectors that are stored in another shape, e.g. ``[heads, channels]`` for the weight of a norm.

    Args:
        shape: Of the stored tensors; one size may be -1.
    """

    shape: tuple[int, ...]

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        return tuple(part.reshape(self.shape) for part in parts)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        return tuple(x.reshape((-1,)) for x in stored)


@dataclass(frozen=True)
class PerTensor:
    """Stored tensors that each hold some of the parts, in their own layout.

    Args:
        layouts: The layout of each stored tensor, with how many parts it holds.
    """

    layouts: tuple[tuple[Layout, int], ...]

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        stored: list[Array] = []
        start = 0
        for layout, count in self.layouts:
            stored += layout.pack(parts[start : start + count])
            start += count
        return tuple(stored)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        pairs = zip(stored, self.layouts, strict=True)
        return tuple(part for x, (layout, _) in pairs for part in layout.unpack((x,)))


@dataclass(frozen=True)
class Interleaved:
    """Another layout whose last part is two parts, interleaved row by row: ``[a 0, b 0, a 1, b 1, ...]``.

    Args:
        inside: How the parts lie, those two as one.
    """

    inside: Layout

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        *others, a, b = parts
        return self.inside.pack([*others, *_IN_TURNS.pack((a, b))])

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        *others, both = self.inside.unpack(stored)
        return (*others, *_IN_TURNS.unpack((both,)))


_IN_TURNS = GroupedHeads((1, 1), 1)


@dataclass(frozen=True)
class FusedRotaryHeads:
    """q, k and v one after the other on axis 0; in each head of q and k the two channels of a RoPE pair are neighbours.

    The parts have the first channels of all pairs before the second ones.

    Args:
        half: RoPE pairs of a head.
    """

    half: int

    def pack(self, parts: Sequence[Array]) -> tuple[Array, ...]:
        """Pack ``parts`` into the stored tensors."""
        halves = GroupedHeads((1, 1), self.half)
        *rotated, v = parts
        return (concat([*(_IN_TURNS.pack(halves.unpack((x,)))[0] for x in rotated), v], 0),)

    def unpack(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Split the stored tensors into their parts."""
        (x,) = stored
        halves = GroupedHeads((1, 1), self.half)
        *rotated, v = split_ratio(x, 0, (1, 1, 1))
        return (*(halves.pack(_IN_TURNS.unpack((x,)))[0] for x in rotated), v)
