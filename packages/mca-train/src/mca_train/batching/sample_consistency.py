"""Every rank reads its samples by itself; whether ranks were given the same is compared here, by checksums.

The ranks of a model replica compute each sample together. All ranks must have as many samples, in the same order.
What differs is told on every rank.
"""

import zlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.sampling import StepSampler
from mca_train.batching.step_stream import StepStream
from mca_train.groups import Ranks

_REMEDY = (
    "sample i must be the same on every rank: give what shuffles, splits or draws a seed, and do not shard the dataset "
    "by rank"
)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of tokens, in tensors of whatever shapes."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(str(tuple(tensor.shape)).encode(), found)
        found = zlib.crc32(tensor.int().numpy().tobytes(), found)
    return found


def joined(first: int, second: int) -> int:
    """One checksum of two."""
    return zlib.crc32(second.to_bytes(4, "big"), first)


def require_same_samples(ranks: Ranks, mine: int, when: str) -> None:
    """Refuses ranks of a replica that were given different samples; collective.

    Args:
        ranks: This rank among the others.
        mine: Checksum of its samples.
        when: Of which steps they are, in words.

    Raises:
        McaError: Names two such ranks.
    """
    if ranks.world_size > ranks.data_parallel_size:
        _require_alike(groups.of_every_rank([ranks.data_parallel_rank, mine], ranks), when)


def first_compared(
    steps: Iterable[StepBatch], ranks: Ranks, sampler: StepSampler | StepStream, when: str
) -> Iterator[StepBatch]:
    """``steps``, of which the first is compared before it is used; collective.

    Args:
        steps: Of this rank.
        ranks: This rank among the others.
        sampler: What dealt them out.
        when: Which step that is, in words.

    Raises:
        McaError: Ranks of a replica have different samples, or ranks sample from others.
    """
    for number, batch in enumerate(steps):
        if number == 0 and ranks.world_size > 1:
            seed = -1 if sampler.seed is None else sampler.seed
            own = [ranks.data_parallel_rank, batch.checksum, sampler.num_samples, seed]
            _require_alike(groups.of_every_rank(own, ranks), when)
        yield batch


def _require_alike(everyone: list[list[int]], when: str) -> None:
    """Raises unless all ranks agree.

    Args:
        everyone: Of every rank its replica, a checksum, and how many samples it has and the seed of their order.
        when: In words.
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
                f"{when}: ranks {first} and {rank}, which compute each sample together, were given different ones; "
                f"{_REMEDY}"
            )
