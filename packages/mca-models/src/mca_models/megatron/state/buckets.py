"""Plan of buckets: offsets of parameters and of their Hugging Face tensors in byte buffers.

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
"""Safetensors code and full shape (without vocabulary padding) by canonical name."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class Entry:
    """Tensor in a byte buffer.

    Args:
        name: Its Hugging Face name.
        dtype: Its dtype.
        shape: Its shape.
        offset: Its first byte.
        start: First expert of a slice of a stacked tensor; None: the full tensor.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    offset: int
    start: int | None = None

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``buffer`` (uint8)."""
        return byte_view(buffer, self.offset, self.dtype, self.shape)


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in a bucket.

    Args:
        param: The parameter.
        dtype: Its dtype in the bucket.
        pieces: Shape of each rank's shard, without vocabulary padding; shards are contiguous.
        start: First byte of the first shard.
        outputs: Its Hugging Face tensors (or its entry of a stacked one), which overwrite the shards.
    """

    param: Param
    dtype: torch.dtype
    pieces: tuple[Shape, ...]
    start: int
    outputs: tuple[Entry, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters that are sent at once.

    Args:
        slots: Its parameters.
        entries: The Hugging Face tensors in it, stacked ones whole.
        nbytes: Size in bytes.
        targets: Ranks that receive it.
    """

    slots: tuple[Slot, ...]
    entries: tuple[Entry, ...]
    nbytes: int
    targets: frozenset[int]


@dataclass(frozen=True)
class Unit:
    """Parameters that stay together: one, or consecutive experts of a stacked tensor.

    Args:
        params: The parameters.
        targets: Ranks that receive them.
        start: First expert of a slice of a stacked tensor; None: all experts.
    """

    params: Sequence[Param]
    targets: frozenset[int]
    start: int | None = None


def byte_view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Return a tensor inside ``buffer`` (uint8) that begins at byte ``offset``."""
    nbytes = prod(shape) * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(shape)


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to where the next tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def stacks(params: Iterable[Param]) -> list[list[Param]]:
    """Group ``params``: those of a stacked tensor together, others alone, in the order of the first."""
    groups: dict[tuple[str, ...], list[Param]] = {}
    for param in params:
        groups.setdefault(param.hf_names(), []).append(param)
    return [sorted(group, key=lambda param: param.expert or 0) for group in groups.values()]


def expert_slices(unit: Unit, specs: ParamSpecs, max_bytes: int) -> Iterator[Unit]:
    """Split the experts of a stacked tensor into slices of at most ``max_bytes``; one expert is never split.

    Experts whose numbers are not consecutive are in different slices. Other units stay as they are.
    """
    if not unit.params[0].stacked:
        yield unit
        return
    most = max(max_bytes // sum(_sizes(unit.params[0], specs)), 1)
    experts: list[Param] = []
    for param in unit.params:
        if experts and (len(experts) == most or param.expert != _expert(experts[-1]) + 1):
            yield Unit(experts, unit.targets, _expert(experts[0]))
            experts = []
        experts.append(param)
    yield Unit(experts, unit.targets, _expert(experts[0]))


def _expert(param: Param) -> int:
    assert param.expert is not None, param.mca_name()
    return param.expert


def plan_buckets(
    units: Iterable[Unit], specs: ParamSpecs, config: McaModelConfig, max_bytes: int
) -> list[Bucket]:
    """Distribute all units, in order, over buckets: a new one begins at ``max_bytes`` or with other targets.

    Args:
        units: All parameters to send.
        specs: Dtype and shape of each parameter.
        config: The model, with its layout.
        max_bytes: Limit of a bucket; a larger unit has its own bucket.
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
        added = list(_entries(made, unit.start))
        slots += made
        entries += added
        ends = [entry.offset + prod(entry.shape) * entry.dtype.itemsize for entry in added]
        filled = aligned(max([filled, *ends]))
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
        end = start
        for name, shape in zip(param.hf_names(), param_part_shapes(param, whole, HF), strict=True):
            outputs.append(Entry(name, DTYPE_OF[code], shape, end))
            nbytes = prod(shape) * ITEM_SIZES[code]
            end += nbytes if len(unit.params) > 1 else aligned(nbytes)  # a stack has no gaps
        yield Slot(param, DTYPE_OF[code], _pieces(param, whole, config), start, tuple(outputs))
        start = end


def _entries(slots: Sequence[Slot], start: int | None) -> Iterator[Entry]:
    """Yield the tensors of a unit: those of its only parameter, or the stacked ones or their slices."""
    first = slots[0]
    for entry in first.outputs:
        stacked = (len(slots), *entry.shape) if first.param.stacked else entry.shape
        yield Entry(entry.name, entry.dtype, stacked, entry.offset, start)


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
