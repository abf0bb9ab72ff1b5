"""Samples of different lengths into packs: rows of several sequences that attention keeps apart.

Padding a batch to its longest sample computes tokens that nobody asked for; packs leave almost none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_train.data.token_dataset import VALUES
from mca_train.types import Sample, SampleSource

_PARTS = ("input_ids", "labels", VALUES, "images")

_TARGETS = ("attention_mask", "completion_mask", "assistant_masks")
"""What other trainers make labels of."""

OPEN_PACKS = 256
"""Packs that are tried for a sample, the oldest first; when none has room, the fullest is closed."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """How full packs are.

    Args:
        samples: That are packed.
        tokens: Of all samples, without any padding.
        packs: That hold them.
        length: Tokens that a pack has room for.
        longest: Tokens of the longest sample.
    """

    samples: int
    tokens: int
    packs: int
    length: int
    longest: int

    @property
    def rate(self) -> float:
        """The share of the packs' room that samples take."""
        return self.tokens / (self.packs * self.length)

    @property
    def padded_rate(self) -> float:
        """The same if every sample were padded to the longest instead."""
        return self.tokens / (self.samples * self.longest)

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} of {self.tokens} tokens in {counted(self.packs, 'pack')} of "
            f"{self.length}: "
            f"{self.rate:.1%} full (padded to the longest: {self.padded_rate:.1%})"
        )


def packs_of(room: int, multiple: int) -> str:
    """Packs in words: the same words for those that hold the same of the same samples."""
    return f"packs of {room} tokens, of sequences in multiples of {multiple}"


class PackedDataset(Dataset[list[Sample]]):
    """Samples in packs; an item is the list of a pack's samples.

    Packs are made once, of samples in a seeded random order, so that they mix; an epoch shuffles the packs.

    Args:
        dataset: Of samples with ``input_ids``, or of preference pairs.
        length: Tokens in a pack at most.
        multiple: Every sequence is padded to a multiple of this (twice the context-parallel size).
        seed: Of the order in which samples are packed; None: their own.
        name: What to call the dataset in errors.

    Raises:
        McaError: A sample is longer than a pack.
    """

    def __init__(
        self,
        dataset: SampleSource,
        length: int,
        *,
        multiple: int = 1,
        seed: int | None = None,
        name: str = "dataset",
    ) -> None:
        lengths = sequence_lengths(dataset)
        needs = (lengths + -lengths % multiple).sum(1)
        fitting = needs[lengths.sum(1) <= length]
        room = max(
            length + -length % multiple, int(fitting.max(initial=0))
        )  # padding does not shut a sample out
        if len(needs) and (longest := int(needs.argmax())) >= 0 and needs[longest] > room:
            raise McaError(
                f"{name}: sample {longest} takes {needs[longest]} tokens, a pack has room for {room}; raise "
                "seq_length (the pack's length) or shorten the sample"
            )
        order = np.arange(len(needs)) if seed is None else np.random.default_rng(seed).permutation(len(needs))
        self.dataset = dataset
        self.packs = first_fit(needs, order, room)
        self.fill = Fill(
            samples=len(needs),
            tokens=int(lengths.sum()),
            packs=len(self.packs),
            length=room,
            longest=int(needs.max(initial=0)),
        )
        self.units = packs_of(room, multiple)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self.dataset[int(number)] for number in self.packs[index]]


def first_fit(
    sizes: NDArray[np.int64], order: NDArray[np.int64], room: int, open_packs: int = OPEN_PACKS
) -> list[NDArray[np.int64]]:
    """Which samples go into which pack.

    Args:
        sizes: Tokens of each sample, none above ``room``.
        order: In which they come.
        room: Tokens of a pack.
        open_packs: Packs that are kept open.
    """
    packs = OpenPacks(room, open_packs)
    closed = [pack for number in order if (pack := packs.add(int(number), int(sizes[number]))) is not None]
    return [np.asarray(pack) for pack in [*closed, *packs.open]]


class OpenPacks:
    """Packs that are being filled.

    Args:
        room: Tokens of a pack.
        limit: Packs that are kept open.
    """

    def __init__(self, room: int, limit: int = OPEN_PACKS) -> None:
        self.open: list[list[Sample]] = []
        self._room, self._limit = room, limit
        self._left = np.zeros(0, np.int64)

    def add(self, item: Sample, size: int) -> list[Sample] | None:
        """Puts ``item`` of ``size`` tokens into the first pack with room; the pack that was closed for a new one."""
        fits, closed = self._left >= size, None
        place = int(fits.argmax()) if fits.any() else len(self.open)
        if place == len(self.open):
            if place == self._limit:
                fullest = int(self._left.argmin())
                closed = self.open.pop(fullest)
                self._left = np.delete(self._left, fullest)
                place -= 1
            self.open.append([])
            self._left = np.append(self._left, self._room)
        self.open[place].append(item)
        self._left[place] -= size
        return closed


def sequence_lengths(dataset: SampleSource) -> NDArray[np.int64]:
    """Tokens of every sequence of every sample: ``[samples, sequences of a sample]``."""
    known = getattr(dataset, "lengths", None)
    if known is None:
        rows = (sequences_of(dataset[index]) for index in range(len(dataset)))
        known = np.array([[len(sequence["input_ids"]) for sequence in row] for row in rows], np.int64)
    known = np.asarray(known, np.int64)
    return known[:, None] if known.ndim == 1 else known


def longest_sample(dataset: SampleSource, multiple: int = 1) -> int:
    """Tokens of the longest sample, its sequences padded to multiples of ``multiple``."""
    lengths = sequence_lengths(dataset)
    return int((lengths + -lengths % multiple).sum(1).max())


def sequences_of(sample: Sample) -> list[Sample]:
    """The sequences a sample is made of: those of a pack, the two of a preference pair, or itself."""
    if isinstance(sample, list):
        return [sequence for item in sample for sequence in sequences_of(item)]
    if "chosen_input_ids" in sample:
        source = {"source": sample["source"]} if "source" in sample else {}
        return [
            {name: sample[f"{side}_{name}"] for name in _PARTS if f"{side}_{name}" in sample} | source
            for side in ("chosen", "rejected")
        ]
    return [sample]


def other_sequence(sample: Sample) -> Sample:
    """What a sample (or each of a pack) has as ``other_input_ids`` and ``other_labels``; nothing if it has none."""
    if isinstance(sample, list):
        found = [other_sequence(item) for item in sample]
        return found if all(found) else []
    if "other_input_ids" not in sample:
        return {}
    return {name: sample[f"other_{name}"] for name in _PARTS if f"other_{name}" in sample}


def count_samples(sample: Sample) -> int:
    """Samples that an item of a dataset stands for: those of a pack."""
    return len(sample) if isinstance(sample, list) else 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """Several sequences one after the other; each list has a tensor of each, of equal lengths."""

    input_ids: list[torch.Tensor]
    labels: list[torch.Tensor]
    """Of the position itself, not of the next."""
    own_tokens: list[int]
    """How many of each sequence are no padding; 0 of one that does not count."""
    values: list[torch.Tensor]
    """Numbers of each sequence; none if samples say none."""

    @property
    def length(self) -> int:
        """Tokens of all."""
        return sum(len(ids) for ids in self.input_ids)

    def padded(self, length: int, pad_token_id: int, ignored: int) -> "Row":
        """With one more sequence, of nothing, up to ``length``."""
        rest = length - self.length
        if not rest:
            return self
        return Row(
            input_ids=[*self.input_ids, torch.full((rest,), pad_token_id)],
            labels=[*self.labels, torch.full((rest,), ignored)],
            own_tokens=[*self.own_tokens, 0],
            values=[*self.values, *(torch.zeros_like(value) for value in self.values[:1])],
        )


def row_of(sequences: Sequence[tuple[Sample, bool]], multiple: int, pad_token_id: int, ignored: int) -> Row:
    """The row of ``(sequence, whether it counts)``, each padded to a multiple of ``multiple``."""
    ids, labels = [], []
    for sequence, counts in sequences:
        require_own_targets(sequence)
        tokens = torch.as_tensor(sequence["input_ids"]).long()
        targets = torch.as_tensor(sequence.get("labels", tokens)).long()
        targets = targets if counts else torch.full_like(targets, ignored)
        rest = (0, -len(tokens) % multiple)
        ids.append(torch.nn.functional.pad(tokens, rest, value=pad_token_id))
        labels.append(torch.nn.functional.pad(targets, rest, value=ignored))
    own = [own_tokens(sequence) * counts for sequence, counts in sequences]
    values = values_of([sequence for sequence, _ in sequences])
    return Row(input_ids=ids, labels=labels, own_tokens=own, values=values)


def own_tokens(sequence: Sample) -> int:
    """Without the padding at the end of a sequence that was padded when it was tokenized."""
    mask = sequence.get("attention_mask")
    return len(sequence["input_ids"]) if mask is None else int(torch.as_tensor(mask).sum())


def require_own_targets(sample: Sample) -> None:
    """Raises if columns say of targets, padding or positions what would not be followed."""
    for name in () if "labels" in sample else _TARGETS:
        if name in sample and not torch.as_tensor(sample[name]).all():
            raise McaError(
                f"a sample of the dataset has {name!r} and no 'labels'; give labels, -100 where {name} is 0"
            )
    mask = torch.as_tensor(sample.get("attention_mask", []))
    if bool((mask[1:] > mask[:-1]).any()):
        raise McaError(
            "a sample of the dataset has padding before tokens; set padding_side of the tokenizer to 'right', or do "
            "not pad it"
        )
    places = torch.as_tensor(sample.get("position_ids", []))
    if places.ndim == 1 and bool((places != torch.arange(len(places))).any()):
        raise McaError(
            "a sample of the dataset has position_ids that do not count from 0; give each sequence as a sample of its "
            "own, and set sequence_packing to have several in a row"
        )


def values_of(sequences: Sequence[Sample]) -> list[torch.Tensor]:
    """The numbers of each sequence, zeros for one that has none beside others that have; empty if none has."""
    known = next((torch.as_tensor(each[VALUES]) for each in sequences if VALUES in each), None)
    if known is None:
        return []
    return [
        torch.as_tensor(each[VALUES]) if VALUES in each else torch.zeros_like(known) for each in sequences
    ]
