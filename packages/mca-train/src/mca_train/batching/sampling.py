"""Which samples a data-parallel rank sees in a training step: seeded, sliced, resumable."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]
SAMPLES = "samples"


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How a global batch is dealt out: ``micro_batch_size x num_micro_batches x data_parallel_size``."""

    micro_batch_size: int
    num_micro_batches: int
    data_parallel_size: int
    data_parallel_rank: int
    group: int = 1
    """Micro-batches that the schedule takes together (interleaved pipelines)."""
    smallest_group: int = 1
    """How many may be left when their number is divided by ``group``, if any are (interleaved pipelines: pp)."""

    @property
    def row_size(self) -> int:
        """Samples in one micro-batch of all data-parallel ranks together."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def global_size(self) -> int:
        """Samples in a step."""
        return self.row_size * self.num_micro_batches


class StepSampler:
    """Yields, for each step, this rank's sample indices: micro-batch after micro-batch.

    The order of samples depends on seed and epoch only, never on the layout, so every layout with the same
    global batch trains on the same batches. The last step of an epoch may be short: it has as few
    micro-batches as hold its samples, and places without a sample hold ``~index`` (negative): a repeated
    sample that must not count.

    Args:
        num_samples: Samples in the dataset.
        shape: How they are dealt out.
        seed: Of the shuffle; None keeps the dataset's order.
        drop_last: Leave out the samples that do not fill a step.
        units: What the samples are, in words.
        order: What decides in which order they come, in words.
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
        """Steps in a whole epoch."""
        return self.steps_after(0)

    def steps_after(self, samples: int) -> int:
        """Steps that remain in an epoch after its first ``samples`` samples."""
        steps, rest = divmod(max(self.num_samples - samples, 0), self.shape.global_size)
        return steps + int(rest > 0 and not self._drop_last)

    def share(self, samples: int) -> float:
        """How much of an epoch its first ``samples`` samples are, as Hugging Face counts."""
        return min(samples / min(self.num_samples, self.num_steps * self.shape.global_size), 1.0)

    def __len__(self) -> int:
        return self.steps_after(self._first)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        size = self.shape.global_size
        for step in range(len(self)):
            first = self._first + step * size
            yield deal(order[first : first + size], self.shape)

    def _order(self) -> Indices:
        if self.seed is None:
            return np.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        return torch.randperm(self.num_samples, generator=generator).numpy()


def deal(samples: Indices, shape: BatchShape) -> list[int]:
    """This rank's part of one step's samples; ``~index`` fills places without a sample."""
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
