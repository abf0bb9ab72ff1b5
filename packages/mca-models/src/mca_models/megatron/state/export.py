"""Export of a live model as a stream of Hugging Face tensors, for a consumer in the same processes (inference engine).

Saving writes the same stream to files (`stream`). This module chooses the receiving ranks and the format.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import DtypeName
from mca_models.checkpoint.hf_writer import HfLayout
from mca_models.megatron.distributed.collectives import require_same_arguments
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.live import LiveModel
from mca_models.megatron.state.buckets import Entry, Unit, aligned, plan_buckets, stacks
from mca_models.megatron.state.fp8_write import quantised
from mca_models.megatron.state.param_specs import (
    cast_param_specs,
    gather_param_specs,
    hf_layout,
    model_params,
)
from mca_models.megatron.state.stream import FilledBucket, Piece, WeightSource, stream
from mca_models.storage.dtypes import CODES

Destination = Literal["all", "first", "replicas"]
Named = tuple[str, Tensor]

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True)
class WeightRequest:
    """Arguments of an export.

    Args:
        to: ``all`` ranks, the ``first``, or the first of each data-parallel replica (``replicas``).
        bucket_bytes: Limit of a bucket.
        dtype: Dtype that weights are cast to; None: not cast.
        fp8: Quantise weights of linears to fp8 blocks.

    Raises:
        McaError: An argument has an invalid value.
    """

    to: Destination = "all"
    bucket_bytes: int = BUCKET_BYTES
    dtype: DtypeName | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
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


def checked_request(
    *, to: Destination, bucket_bytes: int, dtype: DtypeName | None, fp8: bool, merged: bool
) -> WeightRequest:
    """Return the arguments of ``export_weights`` after checking that all ranks passed the same; collective.

    Raises:
        McaError: They differ, or one has an invalid value.
    """
    require_same_arguments(
        "export_weights", to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, merged=merged
    )
    return WeightRequest(to, bucket_bytes, dtype, fp8)


@dataclass(frozen=True)
class WeightBucket:
    """Tensors concatenated in one buffer.

    Args:
        buffer: uint8 ``[nbytes]``, on the model's device, owned by the consumer.
        entries: Positions of the tensors. Tied tensors that the checkpoint has twice share their bytes.
    """

    buffer: Tensor
    entries: tuple[Entry, ...]

    def tensors(self) -> Iterator[Named]:
        """Yield names and tensors, views of the buffer."""
        for entry in self.entries:
            yield entry.name, entry.view(self.buffer)


def export_buckets(
    models: LiveModel, request: WeightRequest, piece: Piece | None = None
) -> Iterator[WeightBucket]:
    """Yield buckets of weights; see ``VirtualModels.export_buckets``.

    Args:
        models: The model.
        request: Arguments of the export.
        piece: This rank's shards, if not the live tensors.
    """
    specs = gather_param_specs(models)
    if request.dtype is not None:
        specs = cast_param_specs(model_params(models), specs, request.dtype)
    layout = hf_layout(models, specs, request.dtype, fp8=request.fp8)
    targets = request.targets(models.rank_context)
    units = [Unit(group, targets) for group in stacks(layout.params)]
    # up to three exist at once: one is gathered, one is yielded, one is still in the consumer's variable
    buckets = plan_buckets(units, specs, models.config, max(request.bucket_bytes * 2 // 3, 1))
    source = WeightSource(
        models.rank_context, models.config, piece or dict(models.canonical_parameters()).get
    )
    with closing(stream(source, buckets)) as arriving:
        for filled in arriving:
            bucket = _bucket(filled, layout)
            del filled
            yield _in_fp8(bucket, layout.scales) if layout.scales else bucket
            del bucket


def each_tensor(buckets: Iterator[WeightBucket]) -> Iterator[Named]:
    """Yield the tensors of ``buckets``; closing this generator closes ``buckets``."""
    try:
        for bucket in buckets:
            yield from bucket.tensors()
            del bucket
    finally:
        getattr(buckets, "close", lambda: None)()


def _bucket(filled: FilledBucket, layout: HfLayout) -> WeightBucket:
    entries = [
        replace(entry, name=name) for entry in filled.bucket.entries for name in layout.written_as(entry.name)
    ]
    return WeightBucket(filled.buffer, tuple(entries))


def _in_fp8(bucket: WeightBucket, scales: Mapping[str, str]) -> WeightBucket:
    return packed([named for each in bucket.tensors() for named in _quantize_tensor(*each, scales)])


def _quantize_tensor(name: str, tensor: Tensor, scales: Mapping[str, str]) -> list[Named]:
    if name not in scales:
        return [(name, tensor)]
    values, scale = quantised(name, tensor)
    return [(name, values), (scales[name], scale)]


def packed(tensors: Sequence[Named]) -> WeightBucket:
    """Copy ``tensors`` into one new buffer."""
    entries, start = [], 0
    for name, tensor in tensors:
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start))
        start += aligned(tensor.nbytes)
    bucket = WeightBucket(
        torch.empty(start, dtype=torch.uint8, device=tensors[0][1].device if tensors else None),
        tuple(entries),
    )
    for (_, tensor), (_, target) in zip(tensors, bucket.tensors(), strict=True):
        target.copy_(tensor)
    return bucket


def packed_buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[WeightBucket]:
    """Yield ``tensors`` in buckets of at most ``max_bytes``; a larger tensor has its own bucket."""
    waiting: list[Named] = []
    for name, tensor in tensors:
        if waiting and sum(aligned(each.nbytes) for _, each in waiting) + tensor.nbytes > max_bytes:
            yield packed(waiting)
            waiting = []
        waiting.append((name, tensor))
    if waiting:
        yield packed(waiting)
