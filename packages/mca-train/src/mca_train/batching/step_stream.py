"""Steps cut from a stream: a dataset that is only iterated, in its own order, and has no length.

Every rank reads the whole stream and takes its own places of each step, so that a step holds the same samples on every
layout. Rows that `mca_train.data.streams` makes into samples are so only on the rank (and by the loader's worker)
that trains on them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice

import numpy as np
import torch.utils.data
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_train.batching.packing import OpenPacks, packs_of, sequences_of
from mca_train.batching.sampling import SAMPLES, BatchShape, deal
from mca_train.types import Sample, SampleSource


def is_stream(dataset: SampleSource) -> bool:
    """Whether ``dataset`` can only be iterated."""
    return isinstance(dataset, IterableDataset) or (
        isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")
    )


def require_steps(dataset: SampleSource, max_steps: int) -> None:
    """Raises a `McaError` for a stream without ``max_steps``."""
    if is_stream(dataset) and max_steps <= 0:
        raise McaError("train_dataset is a stream, which has no length; set max_steps")


def require_whole(dataset: SampleSource, name: str) -> None:
    """Raises a `McaError` for a stream that `datasets` has dealt out already: ranks would take parts of parts."""
    parts = getattr(getattr(dataset, "_distributed", None), "world_size", 1)
    if parts > 1:
        raise McaError(
            f"{name} is one of {parts} parts of a stream (split_dataset_by_node); give every rank the whole stream, of "
            "which each takes its own part of every step"
        )


class StepStream(IterableDataset[list[tuple[Sample, bool]]]):
    """This rank's samples of each step, and whether they count, micro-batch after micro-batch.

    A stream that ends begins anew (after ``set_epoch`` with the number of the pass, if it has that); the last step of a
    pass may be short, as in `mca_train.batching.sampling.StepSampler`.

    Args:
        dataset: What is iterated.
        shape: How a step is dealt out.
        max_steps: Steps of the run.
        make: Makes a sample of what the stream gives; None: it is one.
        drop_last: Leave out what does not fill a step at the end of a pass.
        units: What the samples are, in words.
        order: What decides in which order they come, in words; empty: nobody knows.
    """

    seed: int | None = None
    """The order is the dataset's own."""

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
        """Of the run, as if every step were full."""
        return self.num_steps * self.shape.global_size

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Leave out the steps of the first ``first`` samples, which were trained already; a run is one epoch."""
        self._first_step = first // self.shape.global_size

    def steps_after(self, samples: int) -> int:
        """Steps that remain after ``samples`` samples in full steps."""
        return max(self.num_steps - samples // self.shape.global_size, 0)

    def share(self, samples: int) -> float:
        """How much of the run its first ``samples`` samples are, as Hugging Face counts epochs of streams."""
        return samples / self.num_samples

    def __iter__(self) -> Iterator[list[tuple[Sample, bool]]]:
        worker, workers = _claim_worker()
        for step, rows in enumerate(islice(self._steps(), self._first_step, self.num_steps)):
            if step % workers == worker:
                yield self._deal(rows)

    def _deal(self, rows: list[Sample]) -> list[tuple[Sample, bool]]:
        places = deal(np.arange(len(rows)), self.shape)
        make = self._make or (lambda row: row)
        return [(make(rows[max(place, ~place)]), place >= 0) for place in places]

    def _steps(self) -> Iterator[list[Sample]]:
        """The rows of every step of all ranks, without end."""
        size, given = self.shape.global_size, 0
        for number in count():
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(number)
            rows, before = iter(self._dataset), given
            while group := list(islice(rows, size)):
                if len(group) < size and self._drop_last and given:
                    break
                given += 1
                yield group
            if given == before:
                raise McaError(
                    f"train_dataset gave nothing in pass {number + 1}, after {given} of "
                    f"{counted(self.num_steps, 'step')}; a stream must hold samples, and begin anew "
                    "when it is iterated again"
                )


def _claim_worker() -> tuple[int, int]:
    """Which of how many loader workers this is; from here on streams see none, or they would deal out themselves."""
    info = torch.utils.data.get_worker_info()
    if info is None:
        return 0, 1
    torch.utils.data._utils.worker._worker_info = None
    if info.id:
        logging.getLogger("mca_train").setLevel(logging.ERROR)  # what the first one says, all would
    return info.id, info.num_workers


class PackedStream:
    """A stream of packs: lists of samples that are as long as ``length`` together, first fit over the open packs.

    Args:
        dataset: What is iterated.
        length: Tokens in a pack at most; a sample of as many is a pack also if it is longer with its padding.
        multiple: Every sequence is padded to a multiple of this.
        make: Makes a sample of what the stream gives; None: it is one.
    """

    def __init__(
        self, dataset: SampleSource, length: int, *, multiple: int, make: Callable[[Sample], Sample] | None
    ) -> None:
        self._dataset, self._make = dataset, make or (lambda row: row)
        self._longest, self._length, self._multiple = length, length + -length % multiple, multiple
        self.units = packs_of(self._length, multiple)

    def set_epoch(self, epoch: int) -> None:
        """The stream's own."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Sample]]:
        packs = OpenPacks(self._length)
        for number, row in enumerate(self._dataset):
            place = getattr(row, "place", f"sample {number}")
            sample = self._make(row)
            lengths = [len(sequence["input_ids"]) for sequence in sequences_of(sample)]
            needs = sum(length + -length % self._multiple for length in lengths)
            if needs > self._length and sum(lengths) > self._longest:  # padding shuts no sample out
                raise McaError(
                    f"train_dataset: {place} takes {needs} tokens, a pack has room for {self._length}; raise "
                    "seq_length (the pack's length) or shorten the sample"
                )
            closed = packs.add(sample, needs)
            if closed is not None:
                yield closed
        yield from packs.open
