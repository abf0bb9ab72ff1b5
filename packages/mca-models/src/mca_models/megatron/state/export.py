"""A live model as a stream of Hugging Face tensors, for a consumer in the same processes: an inference engine.

The stream is the one that saving writes to files (`stream`). Here is who gets it, and in which form.
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
    """What is to be exported, and to whom.

    Args:
        to: ``all`` ranks, the ``first``, or the first of each data-parallel replica (``replicas``).
        bucket_bytes: Limit of a bucket.
        dtype: What weights are cast to; None: nothing.
        fp8: Weights of linears as fp8 blocks.

    Raises:
        McaError: One of them is none of what it may be.
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
        """The ranks that get the tensors."""
        if self.to == "all":
            return frozenset(range(rank_context.world_size))
        if self.to == "first":
            return frozenset({0})
        return frozenset(rank_context.grid.rank(dp=dp) for dp in range(rank_context.grid.data_parallel_size))


def agreed(
    *, to: Destination, bucket_bytes: int, dtype: DtypeName | None, fp8: bool, merged: bool
) -> WeightRequest:
    """The arguments of ``export_weights``, the same on all ranks; collective.

    Raises:
        McaError: They differ, or one of them has no such value.
    """
    require_same_arguments(
        "export_weights", to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, merged=merged
    )
    return WeightRequest(to, bucket_bytes, dtype, fp8)


@dataclass(frozen=True)
class WeightBucket:
    """Tensors one after the other in one buffer.

    Args:
        buffer: uint8 ``[nbytes]``, on the model's device. It is the consumer's: nobody writes into it again.
        entries: What lies where. Tied tensors of a checkpoint that has them twice share their bytes.
    """

    buffer: Tensor
    entries: tuple[Entry, ...]

    def tensors(self) -> Iterator[Named]:
        """Names and tensors, views of the buffer."""
        for entry in self.entries:
            yield entry.name, entry.view(self.buffer)


def export_buckets(
    models: LiveModel, wanted: WeightRequest, piece: Piece | None = None
) -> Iterator[WeightBucket]:
    """See ``VirtualModels.export_buckets``.

    Args:
        models: The model.
        wanted: What of it, for whom.
        piece: What this rank holds, if not the live tensors.
    """
    specs = gather_param_specs(models)
    if wanted.dtype is not None:
        specs = cast_param_specs(model_params(models), specs, wanted.dtype)
    layout = hf_layout(models, specs, wanted.dtype, fp8=wanted.fp8)
    targets = wanted.targets(models.rank_context)
    units = [Unit(group, targets) for group in stacks(layout.params)]
    # three stand for a moment: one is gathered, one is handed out, one is still in the consumer's variable
    buckets = plan_buckets(units, specs, models.config, max(wanted.bucket_bytes * 2 // 3, 1))
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
    """The tensors of ``buckets``; closing this closes those."""
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
    """``tensors`` in one new buffer."""
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
    """``tensors`` in buckets of at most ``max_bytes``; a larger tensor is a bucket of its own."""
    waiting: list[Named] = []
    for name, tensor in tensors:
        if waiting and sum(aligned(each.nbytes) for _, each in waiting) + tensor.nbytes > max_bytes:
            yield packed(waiting)
            waiting = []
        waiting.append((name, tensor))
    if waiting:
        yield packed(waiting)
