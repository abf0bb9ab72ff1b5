"""Keeps Megatron's distributed optimizer from saving the wrong elements when gradient buckets are padded.

``DistributedOptimizer.sharded_param_state_fully_reshardable`` gathers every buffer without the padding at the end
of its buckets, then cuts parameters out of it at positions that count the padding (megatron-core 0.16.1 and
0.19.2; its own comment there speaks of a bug that "can lead to data corruption"). With more than one bucket, and
a bucket whose size is no multiple of what its ranks divide, every parameter behind it is saved shifted: no error,
and a run that continues from noise. Here the positions are given without padding while the state is made.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mca_train.types import MegatronOptimizer, Upstream


@contextmanager
def positions_without_padding(optimizer: MegatronOptimizer) -> Iterator[int]:
    """A block in which all buffers of ``optimizer`` say where parameters lie once the padding is gone.

    Yields:
        How many parameters are told otherwise than Megatron would.
    """
    before = [(buffer, buffer.param_index_map) for buffer in _buffers(optimizer)]
    moved = 0
    try:
        for buffer, positions in before:
            unpadded = _unpadded(buffer)
            moved += sum(positions[param] != unpadded[param] for param in positions)
            buffer.param_index_map = unpadded
        yield moved
    finally:
        for buffer, positions in before:
            buffer.param_index_map = positions


def _buffers(optimizer: MegatronOptimizer) -> list[Upstream]:
    """Of the distributed optimizers in a (chained) optimizer; none of the others."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [buffer for part in parts for buffer in getattr(part, "buffers", [])]


def _unpadded(buffer: Upstream) -> dict[nn.Parameter, tuple[int, int, int]]:
    shifts, removed = {}, 0
    for bucket in buffer.buckets:
        shifts[bucket.bucket_id] = removed
        removed += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        param: (start - shifts[number], end - shifts[number], number)
        for param, (start, end, number) in buffer.param_index_map.items()
    }
