"""Sampling of each data-parallel rank's samples per step: seeded, sharded and resumable."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]
SAMPLES = "samples"


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of a global batch: ``micro_batch_size x num_micro_batches x data_parallel_size``."""

    micro_batch_size: int
    num_micro_batches: int
    data_parallel_size: int
    data_parallel_rank: int
    group: int = 1
    """Micro-batches per group of the interleaved schedule."""
    smallest_group: int = 1
    """Minimum size of a last, incomplete group (pp with the interleaved schedule)."""

    @property
    def row_size(self) -> int:
        """Samples in one micro-batch over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def global_size(self) -> int:
        """Samples per step."""
        return self.row_size * self.num_micro_batches


class StepSampler:
    """Sampler of this rank's sample indices of each step, micro-batch after micro-batch.

    The order of samples depends on seed and epoch only, never on the layout, so every layout with the same global batch
    trains on the same batches. The last step of an epoch may be short: it has the fewest micro-batches that hold its
    samples. Unfilled slots hold ``~index`` (negative), a repeated sample that must not count.

    Args:
        num_samples: Samples in the dataset.
        shape: Shape of the global batch.
        seed: Seed of the shuffle; None keeps the dataset's order.
        drop_last: Drop the samples that do not fill a step.
        units: Unit of the samples, in words.
        order: Description of their order.
    """

    def __init__(
        self,
        num_samples: int,
        shape: BatchShape,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        units: str = SAMPLES,
        order: str = "",
    ) -> None:
        self.num_samples = num_samples
        self.shape = shape
        self.units, self.order = units, order
        self.seed = seed
        self._drop_last = drop_last and num_samples >= shape.global_size
        self._epoch = 0
        self._first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Shuffle for ``epoch`` and leave out its first ``first`` samples, which were trained already."""
        self._epoch = epoch
        self._first = first

    @property
    def num_steps(self) -> int:
        """Steps of a full epoch."""
        return self.steps_after(0)

    def steps_after(self, samples: int) -> int:
        """Return the number of steps left in an epoch after its first ``samples`` samples."""
        steps, rest = divmod(max(self.num_samples - samples, 0), self.shape.global_size)
        return steps + int(rest > 0 and not self._drop_last)

    def share(self, samples: int) -> float:
        """Return the fraction of an epoch after ``samples`` samples, as Hugging Face counts."""
        return min(samples / min(self.num_samples, self.num_steps * self.shape.global_size), 1.0)

    def __len__(self) -> int:
        return self.steps_after(self._first)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        size = self.shape.global_size
        for step in range(len(self)):
            first = self._first + step * size
            yield rank_samples(order[first : first + size], self.shape)

    def _order(self) -> Indices:
        if self.seed is None:
            return np.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        return torch.randperm(self.num_samples, generator=generator).numpy()


def rank_samples(samples: Indices, shape: BatchShape) -> list[int]:
    """Return this rank's samples of one step, with ``~index`` in unfilled slots."""
    micro_batches = -(-len(samples) // shape.row_size)
    rest = micro_batches % shape.group
    if micro_batches < shape.group:
        micro_batches = shape.group
    elif 0 < rest < shape.smallest_group:
        micro_batches += shape.smallest_group - rest
    places = np.full(micro_batches * shape.row_size, ~samples[0])
    places[: len(samples)] = samples
    grid = places.reshape(micro_batches, shape.data_parallel_size, shape.micro_batch_size)
    return [int(index) for index in grid[:, shape.data_parallel_rank].reshape(-1)]
