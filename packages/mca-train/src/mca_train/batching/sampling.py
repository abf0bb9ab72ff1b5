"""Sampling of each data-parallel rank's samples per step, sharded and resumable.

An index is shuffled by a seed. A stream has its own order and no length: every rank reads the whole stream and keeps
its shard of each step, so that a step holds the same samples on every layout. Rows of `mca_train.data.streams` are
tokenized only on the rank, and by the loader worker, that trains on them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_train.batching.packing import OpenPacks, describe_packs, split_sequences
from mca_train.types import Sample, SampleSource

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


class CountedSamples(Dataset[tuple[Sample, bool]]):
    """Dataset in which index ``~i`` returns sample ``i`` marked as one that does not count."""

    def __init__(self, dataset: SampleSource) -> None:
        self.samples = dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Sample, bool]:
        return self.samples[max(index, ~index)], index >= 0

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Sample, bool]]:
        return [self[index] for index in indices]


def is_stream(dataset: SampleSource) -> bool:
    """Return True if ``dataset`` can only be iterated."""
    return isinstance(dataset, IterableDataset) or (
        isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")
    )


def require_steps(dataset: SampleSource, max_steps: int) -> None:
    """Raise a `McaError` for a stream without ``max_steps``."""
    if is_stream(dataset) and max_steps <= 0:
        raise McaError("train_dataset is a stream, which has no length; set max_steps")


def require_unsharded(dataset: SampleSource, name: str) -> None:
    """Raise a `McaError` for a stream that `datasets` has sharded already, which ranks would shard again."""
    parts = getattr(getattr(dataset, "_distributed", None), "world_size", 1)
    if parts > 1:
        raise McaError(
            f"{name} is one of {parts} shards of a stream (split_dataset_by_node); pass the whole stream to every "
            "rank; mca shards every step itself"
        )


class StepStream(IterableDataset[list[tuple[Sample, bool]]]):
    """Iterable dataset of this rank's ``(sample, counts)`` pairs of each step, micro-batch after micro-batch.

    A stream that ends is restarted, after ``set_epoch`` with the number of the pass if it has that method. The last
    step of a pass may be short, as in `StepSampler`.

    Args:
        dataset: Iterable dataset.
        shape: Shape of the global batch.
        max_steps: Steps of the run.
        make: Function from an item of the stream to a sample; None: items are samples.
        drop_last: Drop an incomplete step at the end of a pass.
        units: Unit of the samples, in words.
        order: Description of their order; empty: unknown.
    """

    seed: int | None = None
    """None: the order is that of the dataset."""

    def __init__(
        self,
        dataset: SampleSource,
        shape: BatchShape,
        max_steps: int,
        *,
        make: Callable[[Sample], Sample] | None = None,
        drop_last: bool = False,
        units: str = SAMPLES,
        order: str = "",
    ) -> None:
        self.shape = shape
        self.units, self.order = units, order
        self.num_steps = max_steps
        self._dataset, self._make, self._drop_last = dataset, make, drop_last
        self._first_step = 0

    @property
    def num_samples(self) -> int:
        """Samples of the run if every step is full."""
        return self.num_steps * self.shape.global_size

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Leave out the steps of the first ``first`` samples, which were trained already; a run is one epoch."""
        self._first_step = first // self.shape.global_size

    def steps_after(self, samples: int) -> int:
        """Return the number of steps left after ``samples`` samples in full steps."""
        return max(self.num_steps - samples // self.shape.global_size, 0)

    def share(self, samples: int) -> float:
        """Return the fraction of the run after ``samples`` samples, as Hugging Face counts epochs of streams."""
        return samples / self.num_samples

    def __iter__(self) -> Iterator[list[tuple[Sample, bool]]]:
        worker, workers = _claim_worker()
        for step, rows in enumerate(islice(self._steps(), self._first_step, self.num_steps)):
            if step % workers == worker:
                yield self._deal(rows)

    def _deal(self, rows: list[Sample]) -> list[tuple[Sample, bool]]:
        places = rank_samples(np.arange(len(rows)), self.shape)
        make = self._make or (lambda row: row)
        return [(make(rows[max(place, ~place)]), place >= 0) for place in places]

    def _steps(self) -> Iterator[list[Sample]]:
        """Yield the rows of every step over all ranks, without end."""
        size, num_steps_made = self.shape.global_size, 0
        for number in count():
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(number)
            rows, before = iter(self._dataset), num_steps_made
            while group := list(islice(rows, size)):
                if len(group) < size and self._drop_last and num_steps_made:
                    break
                num_steps_made += 1
                yield group
            if num_steps_made == before:
                raise McaError(
                    f"train_dataset yielded no samples in pass {number + 1}, after {num_steps_made} of "
                    f"{counted(self.num_steps, 'step')}; a stream must yield samples, and must restart "
                    "when it is iterated again; return a new iterator from __iter__"
                )


def _claim_worker() -> tuple[int, int]:
    """Return the worker's index and the number of workers, and hide both, so that streams do not shard themselves."""
    info = torch.utils.data.get_worker_info()
    if info is None:
        return 0, 1
    torch.utils.data._utils.worker._worker_info = None
    if info.id:
        logging.getLogger("mca_train").setLevel(logging.ERROR)  # only the first worker logs warnings
    return info.id, info.num_workers


class PackedStream:
    """Stream of packs (lists of samples) of up to ``length`` tokens, filled first-fit over the open packs.

    Args:
        dataset: Iterable dataset.
        length: Maximum tokens of a pack; a sample of this length fits even if its padding exceeds it.
        multiple: Every sequence is padded to a multiple of this.
        make: Function from an item of the stream to a sample; None: items are samples.
    """

    def __init__(
        self, dataset: SampleSource, length: int, *, multiple: int, make: Callable[[Sample], Sample] | None
    ) -> None:
        self._dataset, self._make = dataset, make or (lambda row: row)
        self._longest, self._length, self._multiple = length, length + -length % multiple, multiple
        self.units = describe_packs(self._length, multiple)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, if it has one."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Sample]]:
        packs = OpenPacks(self._length)
        for number, row in enumerate(self._dataset):
            place = getattr(row, "place", f"sample {number}")
            sample = self._make(row)
            lengths = [len(sequence["input_ids"]) for sequence in split_sequences(sample)]
            needs = sum(length + -length % self._multiple for length in lengths)
            # a sample is not too long because of its padding
            if needs > self._length and sum(lengths) > self._longest:
                raise McaError(
                    f"train_dataset: {place} takes {needs} tokens, but a pack holds {self._length}; raise "
                    "seq_length (the pack's length) or shorten the sample"
                )
            closed = packs.add(sample, needs)
            if closed is not None:
                yield closed
        yield from packs.open
