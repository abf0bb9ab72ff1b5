"""Checks by checksums that all ranks of a replica read the same samples.

Each rank reads its samples independently. The ranks of a replica compute each sample together, and all ranks must have
the same number of samples in the same order. Every rank raises the error.
"""

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.packing import split_sequences
from mca_train.batching.sampling import StepSampler, StepStream
from mca_train.groups import Ranks
from mca_train.types import SampleSource

RANDOM = -1
"""Checksum of samples that are drawn whenever they are read."""
_READS = 4  # samples that change now and then do so between these
_REMEDY = (
    "sample i must be the same on every rank: set a seed for every shuffle, split and draw, and do not shard the "
    "dataset by rank"
)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 of the shapes and the tokens of ``tensors``."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(str(tuple(tensor.shape)).encode(), found)
        found = zlib.crc32(tensor.int().numpy().tobytes(), found)
    return found


def combine_checksums(first: int, second: int) -> int:
    """Combine two checksums into one."""
    return zlib.crc32(second.to_bytes(4, "big"), first)


def probe_checksum(dataset: SampleSource, size: int) -> int:
    """Return a checksum of the first, the middle and the last sample's tokens.

    It is `RANDOM` if they differ when read again, or if a collator makes the tokens of them.

    Args:
        dataset: Dataset with an index.
        size: Number of its samples.
    """
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            reads = [list(_probe_tokens(dataset, size)) for _ in range(_READS)]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    found = {checksum(read) for read in reads}
    return found.pop() if reads[0] and len(found) == 1 else RANDOM


def _probe_tokens(dataset: SampleSource, size: int) -> Iterator[Tensor]:
    for index in sorted({0, size // 2, size - 1}):
        for sequence in split_sequences(dataset[index]):
            if isinstance(sequence, Mapping) and "input_ids" in sequence:
                yield torch.as_tensor(sequence["input_ids"]).long()


def require_same_samples(ranks: Ranks, mine: int, when: str) -> None:
    """Raise an error if ranks of a replica have different samples; collective.

    Args:
        ranks: Position of this rank in the layout.
        mine: Checksum of this rank's samples.
        when: Description of the steps, for errors.

    Raises:
        McaError: Two ranks of a replica differ; the message names them.
    """
    if ranks.world_size > ranks.data_parallel_size:
        _require_equal(groups.gather_numbers([ranks.data_parallel_rank, mine], ranks), when)


def check_first_step(
    steps: Iterable[StepBatch],
    ranks: Ranks,
    sampler: StepSampler | StepStream,
    when: str,
    dataset: SampleSource = None,
) -> Iterator[StepBatch]:
    """Yield ``steps``, and compare the first one across ranks before it is used; collective.

    Args:
        steps: Steps of this rank.
        ranks: Position of this rank in the layout.
        sampler: Sampler of the steps.
        when: Description of the first step, for errors.
        dataset: The samples with their index, of which a few are compared over all replicas; None: a stream.

    Raises:
        McaError: Ranks of a replica have different samples, or ranks differ in dataset size, seed or order.
    """
    for number, batch in enumerate(steps):
        if number == 0 and ranks.world_size > 1:
            seed = -1 if sampler.seed is None else sampler.seed
            probed = dataset is not None and ranks.data_parallel_size > 1
            probe = probe_checksum(dataset, sampler.num_samples) if probed else RANDOM
            own = [ranks.data_parallel_rank, batch.checksum, sampler.num_samples, seed, probe]
            everyone = groups.gather_numbers(own, ranks)
            _require_equal([row[:-1] for row in everyone], when)
            _require_equal_probes([row[-1] for row in everyone], when)
        yield batch


def _require_equal_probes(probes: list[int], when: str) -> None:
    """Raise a `McaError` unless all ranks have read equal samples; random ones are not compared."""
    if RANDOM in probes:
        return
    for rank, probe in enumerate(probes):
        if probe != probes[0]:
            raise McaError(
                f"{when}: ranks 0 and {rank} have different samples, or the same in another order; {_REMEDY}"
            )


def _require_equal(everyone: list[list[int]], when: str) -> None:
    """Raise a `McaError` unless all ranks agree.

    Args:
        everyone: Replica, checksum, number of samples and seed of every rank.
        when: Description of the steps.
    """
    of_all = everyone[0][2:]
    for rank, (_, _, *its) in enumerate(everyone):
        for what, first, other in zip(("samples", "data_seed"), of_all, its, strict=False):
            if first != other:
                raise McaError(f"{when}: rank 0 has {first} {what}, rank {rank} has {other}; {_REMEDY}")
    known: dict[int, tuple[int, int]] = {}
    for rank, (replica, its_samples, *_) in enumerate(everyone):
        first, expected = known.setdefault(replica, (rank, its_samples))
        if its_samples != expected:
            raise McaError(
                f"{when}: ranks {first} and {rank}, of one replica, have different samples; {_REMEDY}"
            )
