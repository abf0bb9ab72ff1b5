"""Export of a live model as a stream of Hugging Face tensors, for a consumer in the same processes (inference engine).

Saving writes the same stream to files (`stream`). This module chooses the receiving ranks and the format.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import DtypeName
from mca_models.checkpoint.hf_writer import HfTensors
from mca_models.megatron.distributed.collectives import require_same_arguments
from mca_models.megatron.distributed.parallel import LiveModel, RankContext
from mca_models.megatron.state.buckets import (
    Entry,
    ParamSpecs,
    Unit,
    aligned,
    expert_slices,
    plan_buckets,
    stacks,
)
from mca_models.megatron.state.fp8 import quantised
from mca_models.megatron.state.param_specs import (
    cast_param_specs,
    gather_param_specs,
    model_params,
    split_specs,
)
from mca_models.megatron.state.stream import FilledBucket, Piece, WeightSource, stream
from mca_models.megatron.state.weight_receiver import Weight
from mca_models.storage.dtypes import CODES
from mca_models.weights import Param

Destination = Literal["all", "first", "replicas"]
Select = Callable[[Sequence[Param], ParamSpecs, Piece], Collection[str]]
"""Returns the canonical names of the parameters to export, given all, their specs and this rank's shards."""

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class WeightRequest:
    """Arguments of ``VirtualModels.export_weights`` and the like, which describe them."""

    to: Destination = "all"
    bucket_bytes: int = BUCKET_BYTES
    dtype: DtypeName | None = None
    fp8: bool = False
    split_experts: bool = False
    merged: bool = False
    per_expert: bool = False

    def require_valid(self, method: str = "export_weights") -> None:
        """Check that all ranks passed the same arguments to ``method``; collective.

        Raises:
            McaError: They differ, or one has an invalid value.
        """
        require_same_arguments(method, **vars(self))
        if self.to not in get_args(Destination):
            raise McaError(f"to={self.to!r} is none of {', '.join(get_args(Destination))}")
        if self.dtype is not None and self.dtype not in CODES:
            raise McaError(f"dtype {self.dtype!r} is none of {', '.join(CODES)}")
        if self.bucket_bytes < 1:
            raise McaError(f"bucket_bytes is {self.bucket_bytes}; expected a positive number of bytes")

    def targets(self, rank_context: RankContext) -> frozenset[int]:
        """Return the ranks that receive the tensors."""
        if self.to == "all":
            return frozenset(range(rank_context.world_size))
        if self.to == "first":
            return frozenset({0})
        return frozenset(rank_context.grid.rank(dp=dp) for dp in range(rank_context.grid.data_parallel_size))


@dataclass(frozen=True)
class WeightBucket:
    """Tensors concatenated in one buffer.

    Args:
        buffer: uint8 ``[nbytes]``, on the model's device, owned by the consumer.
        entries: Positions of the tensors. Tied tensors that the checkpoint has twice share their bytes.
    """

    buffer: Tensor
    entries: tuple[Entry, ...]

    def tensors(self) -> Iterator[Weight]:
        """Yield names and tensors, views of the buffer; slices also have their first expert."""
        for entry in self.entries:
            tensor = entry.view(self.buffer)
            yield (entry.name, tensor) if entry.start is None else (entry.name, tensor, entry.start)


def export_buckets(
    models: LiveModel, request: WeightRequest, piece: Piece | None = None, select: Select | None = None
) -> Iterator[WeightBucket]:
    """Yield buckets of weights; see ``VirtualModels.export_buckets``.

    Args:
        models: The model.
        request: Arguments of the export.
        piece: This rank's shards, if not the live tensors.
        select: Returns the names of the parameters to export, the same on every rank; None: all.
    """
    params, specs = model_params(models), gather_param_specs(models)
    if request.dtype is not None:
        specs = cast_param_specs(params, specs, request.dtype)
    written = HfTensors(params, models.config, *split_specs(specs), fp8=request.fp8)
    piece = piece or dict(models.canonical_parameters()).get
    selected = None if select is None else select(written.params, specs, piece)
    # up to three exist at once: one is gathered, one is yielded, one is still in the consumer's variable
    max_bytes = max(request.bucket_bytes * 2 // 3, 1)
    units = _units(
        written.params, request.targets(models.rank_context), selected, whole=not request.split_experts
    )
    if request.split_experts:
        units = [piece for unit in units for piece in expert_slices(unit, specs, max_bytes)]
    buckets = plan_buckets(units, specs, models.config, max_bytes)
    source = WeightSource(models.rank_context, models.config, piece)
    with closing(stream(source, buckets)) as arriving:
        for filled in arriving:
            bucket = _bucket(filled, written)
            del filled
            yield _in_fp8(bucket, written.scales) if written.scales else bucket
            del bucket


def _units(
    params: Sequence[Param], targets: frozenset[int], selected: Collection[str] | None, *, whole: bool
) -> list[Unit]:
    """Return the units of the ``selected`` parameters; a stacked tensor is complete if ``whole``."""
    units: list[Unit] = []
    for group in stacks(params):
        chosen = [param for param in group if selected is None or param.mca_name() in selected]
        if chosen:
            units.append(Unit(group if whole else chosen, targets))
    return units


def each_tensor(buckets: Iterator[WeightBucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of ``buckets``; closing this generator closes ``buckets``."""
    try:
        for bucket in buckets:
            for entry in bucket.entries:
                yield entry.name, entry.view(bucket.buffer)
            del bucket
    finally:
        getattr(buckets, "close", lambda: None)()


def _bucket(filled: FilledBucket, written: HfTensors) -> WeightBucket:
    entries = [
        replace(entry, name=name)
        for entry in filled.bucket.entries
        for name in written.written_as(entry.name)
    ]
    return WeightBucket(filled.buffer, tuple(entries))


def _in_fp8(bucket: WeightBucket, scales: Mapping[str, str]) -> WeightBucket:
    return packed([weight for each in bucket.tensors() for weight in _quantize_tensor(scales, *each)])


def _quantize_tensor(
    scales: Mapping[str, str], name: str, tensor: Tensor, start: int | None = None
) -> list[Weight]:
    pairs = [(name, tensor)]
    if name in scales:
        values, scale = quantised(name, tensor)
        pairs = [(name, values), (scales[name], scale)]
    return [(*pair, start) for pair in pairs] if start is not None else [*pairs]


def packed(tensors: Sequence[Weight]) -> WeightBucket:
    """Copy ``tensors`` into one new buffer."""
    entries, end = [], 0
    for name, tensor, *start in tensors:
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), end, *start))
        end += aligned(tensor.nbytes)
    device = tensors[0][1].device if tensors else None
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor, *_), entry in zip(tensors, entries, strict=True):
        entry.view(buffer).copy_(tensor)
    return WeightBucket(buffer, tuple(entries))


def packed_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[WeightBucket]:
    """Yield ``tensors`` in buckets of at most ``max_bytes``; a larger tensor has its own bucket."""
    waiting: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if waiting and sum(aligned(each.nbytes) for _, each in waiting) + tensor.nbytes > max_bytes:
            yield packed(waiting)
            waiting = []
        waiting.append((name, tensor))
    if waiting:
        yield packed(waiting)
