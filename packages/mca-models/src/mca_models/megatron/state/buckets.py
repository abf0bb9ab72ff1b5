"""How parameters and the Hugging Face tensors made of them lie in buckets of bytes, before any of them is sent.

Every rank makes the same plan. Nothing is communicated here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.placement import shard_count
from mca_models.megatron.tensors import DTYPE_OF
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.source import param_part_shapes
from mca_models.weights import Param

Shape = tuple[int, ...]

ParamSpecs = Mapping[str, tuple[str, Shape]]
"""Safetensors code and whole shape (without vocabulary padding) by canonical name."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class Entry:
    """A tensor in a buffer of bytes.

    Args:
        name: Its Hugging Face name.
        dtype: Of its elements.
        shape: Its sizes.
        offset: Its first byte.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    offset: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of ``buffer`` (uint8)."""
        return byte_view(buffer, self.offset, self.dtype, self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a bucket.

    Args:
        param: The parameter.
        dtype: In which it is sent.
        pieces: The shape of each rank's piece, without vocabulary padding; they arrive one after the other.
        start: The first byte of the first piece.
        outputs: Its Hugging Face tensors (of a stacked one its own entry), which take the pieces' place.
    """

    param: Param
    dtype: torch.dtype
    pieces: tuple[Shape, ...]
    start: int
    outputs: tuple[Entry, ...]


@dataclass(frozen=True)
class Bucket:
    """What is sent at once.

    Args:
        slots: Its parameters.
        entries: The Hugging Face tensors in it, stacked ones whole.
        nbytes: Of all.
        targets: The ranks that get it.
    """

    slots: tuple[Slot, ...]
    entries: tuple[Entry, ...]
    nbytes: int
    targets: frozenset[int]


@dataclass(frozen=True)
class Unit:
    """Parameters that stay together: one, or the experts that make up a stacked tensor, in their order.

    Args:
        params: The parameters.
        targets: The ranks that get them.
    """

    params: Sequence[Param]
    targets: frozenset[int]


def byte_view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """A tensor inside ``buffer`` (uint8), from byte ``offset`` on."""
    nbytes = prod(shape) * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(shape)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to where the next tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def stacks(params: Iterable[Param]) -> list[list[Param]]:
    """``params`` one by one, but those of a stacked tensor together, in the order of the first of them."""
    found: dict[tuple[str, ...], list[Param]] = {}
    for param in params:
        found.setdefault(param.hf_names(), []).append(param)
    return [sorted(group, key=lambda param: param.expert or 0) for group in found.values()]


def plan_buckets(
    units: Iterable[Unit], specs: ParamSpecs, config: McaModelConfig, max_bytes: int
) -> list[Bucket]:
    """All units in their order: a bucket ends where the next would be too large for it, or has other targets.

    Args:
        units: All that is sent.
        specs: What each parameter is sent as.
        config: Of the model, with its layout.
        max_bytes: Limit of a bucket; a unit that is larger is a bucket of its own.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    entries: list[Entry] = []
    filled, targets = 0, frozenset[int]()
    for unit in units:
        nbytes = sum(aligned(n) for n in _sizes(unit.params[0], specs)) * len(unit.params)
        if slots and (filled + nbytes > max_bytes or unit.targets != targets):
            buckets.append(Bucket(tuple(slots), tuple(entries), filled, targets))
            slots, entries, filled = [], [], 0
        targets = unit.targets
        made = list(_slots(unit, specs, config, filled))
        slots += made
        entries += _entries(made)
        filled = aligned(max(entry.offset + prod(entry.shape) * entry.dtype.itemsize for entry in entries))
    if slots:
        buckets.append(Bucket(tuple(slots), tuple(entries), filled, targets))
    return buckets


def _sizes(param: Param, specs: ParamSpecs) -> list[int]:
    code, whole = specs[param.mca_name()]
    return [prod(shape) * ITEM_SIZES[code] for shape in param_part_shapes(param, whole, HF)]


def _slots(unit: Unit, specs: ParamSpecs, config: McaModelConfig, start: int) -> Iterator[Slot]:
    assert len(unit.params) == 1 or len(unit.params[0].hf) == 1
    for param in unit.params:
        code, whole = specs[param.mca_name()]
        outputs: list[Entry] = []
        at = start
        for name, shape in zip(param.hf_names(), param_part_shapes(param, whole, HF), strict=True):
            outputs.append(Entry(name, DTYPE_OF[code], shape, at))
            nbytes = prod(shape) * ITEM_SIZES[code]
            at += nbytes if len(unit.params) > 1 else aligned(nbytes)  # a stack has no gaps
        yield Slot(param, DTYPE_OF[code], _pieces(param, whole, config), start, tuple(outputs))
        start = at


def _entries(slots: Sequence[Slot]) -> Iterator[Entry]:
    """The tensors of a unit: those of its one parameter, or what its parameters are entries of."""
    first = slots[0]
    for entry in first.outputs:
        stacked = (len(slots), *entry.shape) if first.param.stacked else entry.shape
        yield Entry(entry.name, entry.dtype, stacked, entry.offset)


def _pieces(param: Param, whole: Shape, config: McaModelConfig) -> tuple[Shape, ...]:
    size, axis = shard_count(param, config.layout), param.shard.axis
    if axis is None or size == 1:
        return (whole,)
    if not param.vocab:
        piece = list(whole)
        piece[axis] //= size
        return (tuple(piece),) * size
    share = config.padded_vocab_size // size
    rows = (min(max(whole[0] - rank * share, 0), share) for rank in range(size))
    return tuple((count, *whole[1:]) for count in rows)
