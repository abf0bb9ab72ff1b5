"""Sequence packing: several sequences in one row, with attention within each sequence only.

Padding a batch to its longest sample wastes compute on padding tokens; packs contain almost none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_train.data.token_dataset import IGNORED, VALUES
from mca_train.types import Sample, SampleSource

ROUTED_EXPERTS = "routed_experts"
"""Column of the experts that an engine chose: ``[tokens, layers, topk]``."""

_PARTS = ("input_ids", "labels", VALUES, "images", ROUTED_EXPERTS)

_TARGETS = ("attention_mask", "completion_mask", "assistant_masks")
"""Columns that other trainers derive labels from."""

_SHOWN = 8
"""Tokens of a sample that an error shows."""

OPEN_PACKS = 256
"""Open packs that are tried for a sample, oldest first; if none has room, the fullest is closed."""


@dataclass(frozen=True, kw_only=True)
class PackingStats:
    """Fill statistics of a packed dataset.

    Args:
        samples: Number of packed samples.
        tokens: Tokens of all samples without padding.
        packs: Number of packs.
        length: Capacity of a pack in tokens.
        longest: Tokens of the longest sample.
    """

    samples: int
    tokens: int
    packs: int
    length: int
    longest: int

    @property
    def rate(self) -> float:
        """Share of the packs' capacity that is filled with tokens."""
        return self.tokens / (self.packs * self.length)

    @property
    def padded_rate(self) -> float:
        """Share of tokens that are not padding if every sample were padded to the longest instead."""
        return self.tokens / (self.samples * self.longest)

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} of {self.tokens} tokens in {counted(self.packs, 'pack')} of "
            f"{self.length}: "
            f"{self.rate:.1%} full (padded to the longest: {self.padded_rate:.1%})"
        )


def packing_multiple(context_parallel_size: int) -> int:
    """Return the multiple that packed sequences are padded to."""
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


def describe_packs(room: int, multiple: int) -> str:
    """Describe a packing in words; equal texts mean equal packs of the same samples."""
    return f"packs of {room} tokens, of sequences in multiples of {multiple}"


class PackedDataset(Dataset[list[Sample]]):
    """Dataset of packs; an item is the list of a pack's samples.

    Packs are built once, from samples in a seeded random order; each epoch shuffles the packs.

    Args:
        dataset: Samples with ``input_ids``, or preference pairs.
        length: Maximum tokens of a pack.
        multiple: Every sequence is padded to a multiple of this (twice the context-parallel size).
        seed: Seed of the packing order; None: the order of the dataset.
        name: Name of the dataset in errors.

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
        )  # a sample is not too long because of its padding
        if needs.max(initial=0) > room:
            longest = int(needs.argmax())
            raise McaError(
                f"{name}: sample {longest} takes {needs[longest]} tokens, but a pack holds {room}; raise "
                "seq_length (the pack's length) or shorten the sample"
            )
        order = np.arange(len(needs)) if seed is None else np.random.default_rng(seed).permutation(len(needs))
        self.dataset, self._name = dataset, name
        self._lengths = lengths
        self.packs = first_fit(needs, order, room)
        self.fill = PackingStats(
            samples=len(needs),
            tokens=int(lengths.sum()),
            packs=len(self.packs),
            length=room,
            longest=int(needs.max(initial=0)),
        )
        self.units = describe_packs(room, multiple)

    def __len__(self) -> int:
        return len(self.packs)

    def is_current(self) -> bool:
        """Return False if the dataset has samples of other lengths now, as far as they are known without reading it."""
        if len(self.dataset) != self.fill.samples:
            return False
        known = isinstance(self.dataset, list) or getattr(self.dataset, "lengths", None) is not None
        return not known or np.array_equal(sequence_lengths(self.dataset), self._lengths)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self._checked_sample(int(number)) for number in self.packs[index]]

    def _checked_sample(self, number: int) -> Sample:
        """Return a sample, unless it is longer than the pack was planned for."""
        sample, planned = self.dataset[number], int(self._lengths[number].sum())
        tokens = sum(len(sequence["input_ids"]) for sequence in split_sequences(sample))
        if tokens > planned:
            raise McaError(
                f"{self._name}: sample {number} has {tokens} tokens, but had {planned} when the packs were made, from "
                "the dataset's attribute 'lengths' if it has one; let it return the number of tokens of each sample, "
                "and do not change a dataset in place"
            )
        return sample


def first_fit(
    sizes: NDArray[np.int64], order: NDArray[np.int64], room: int, open_packs: int = OPEN_PACKS
) -> list[NDArray[np.int64]]:
    """Assign samples to packs by the first-fit heuristic.

    Args:
        sizes: Tokens of each sample, none above ``room``.
        order: Order of the samples.
        room: Capacity of a pack in tokens.
        open_packs: Maximum number of open packs.
    """
    packs = OpenPacks(room, open_packs)
    closed = [pack for number in order if (pack := packs.add(int(number), int(sizes[number]))) is not None]
    return [np.asarray(pack) for pack in [*closed, *packs.open]]


class OpenPacks:
    """Packs that still have room.

    Args:
        room: Capacity of a pack in tokens.
        limit: Maximum number of open packs.
    """

    def __init__(self, room: int, limit: int = OPEN_PACKS) -> None:
        self.open: list[list[Sample]] = []
        self._room, self._limit = room, limit
        self._left = np.zeros(0, np.int64)

    def add(self, item: Sample, size: int) -> list[Sample] | None:
        """Add ``item`` of ``size`` tokens to the first pack with room; return the pack that was closed, if any."""
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
    """Return the number of tokens of every sequence: ``[samples, sequences per sample]``."""
    known = getattr(dataset, "lengths", None)
    if known is None:
        rows = (split_sequences(dataset[index]) for index in range(len(dataset)))
        known = np.array([[len(sequence["input_ids"]) for sequence in row] for row in rows], np.int64)
    known = np.asarray(known, np.int64)
    return known[:, None] if known.ndim == 1 else known


def longest_sample(dataset: SampleSource, multiple: int = 1) -> int:
    """Return the length of the longest sample, with its sequences padded to multiples of ``multiple``."""
    lengths = sequence_lengths(dataset)
    return int((lengths + -lengths % multiple).sum(1).max())


def split_sequences(sample: Sample) -> list[Sample]:
    """Split a pack, a preference pair or a single sample into sequences."""
    if isinstance(sample, list):
        return [sequence for item in sample for sequence in split_sequences(item)]
    if "chosen_input_ids" in sample:
        source = {"source": sample["source"]} if "source" in sample else {}
        return [
            {name: sample[f"{side}_{name}"] for name in _PARTS if f"{side}_{name}" in sample} | source
            for side in ("chosen", "rejected")
        ]
    return [sample]


def kl_sequence(sample: Sample) -> Sample:
    """Return the KL sequence (``other_*`` columns) of a sample or of each sample of a pack; empty if there is none."""
    if isinstance(sample, list):
        found = [kl_sequence(item) for item in sample]
        return found if all(found) else []
    if "other_input_ids" not in sample:
        return {}
    return {name: sample[f"other_{name}"] for name in _PARTS if f"other_{name}" in sample}


def count_samples(sample: Sample) -> int:
    """Return the number of samples in an item of a dataset, which may be a pack."""
    return len(sample) if isinstance(sample, list) else 1


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """Sequence of a packed row, padded to the multiple that the row needs."""

    input_ids: torch.Tensor
    """``[tokens]``"""
    labels: torch.Tensor
    """``[tokens]``, not shifted."""
    num_tokens: int
    """Tokens without padding; 0 if the sequence does not count."""
    values: torch.Tensor | None
    """Extra numbers; None if no sequence of the row has any."""


def pack_row(
    sequences: Sequence[tuple[Sample, bool]], multiple: int, pad_token_id: int
) -> list[PackedSequence]:
    """Pack ``(sequence, counts)`` pairs into a row, each padded to a multiple of ``multiple``."""
    values = collect_values([sequence for sequence, _ in sequences])
    row = []
    for index, (sequence, counts) in enumerate(sequences):
        tokens, targets = sample_tokens(sequence)
        targets = targets if counts else torch.full_like(targets, IGNORED)
        rest = (0, -len(tokens) % multiple)
        row.append(
            PackedSequence(
                input_ids=torch.nn.functional.pad(tokens, rest, value=pad_token_id),
                labels=torch.nn.functional.pad(targets, rest, value=IGNORED),
                num_tokens=count_tokens(sequence) * counts,
                values=values[index] if values else None,
            )
        )
    return row


def row_length(row: Sequence[PackedSequence]) -> int:
    """Return the number of tokens of a packed row."""
    return sum(len(sequence.input_ids) for sequence in row)


def pad_row(row: list[PackedSequence], length: int, pad_token_id: int) -> list[PackedSequence]:
    """Return ``row`` padded to ``length`` by a further sequence of padding."""
    rest = length - row_length(row)
    if not rest:
        return row
    known = row[0].values
    padding = PackedSequence(
        input_ids=torch.full((rest,), pad_token_id),
        labels=torch.full((rest,), IGNORED),
        num_tokens=0,
        values=None if known is None else torch.zeros_like(known),
    )
    return [*row, padding]


def count_tokens(sequence: Sample) -> int:
    """Count the tokens of a sequence without the padding in its ``attention_mask``."""
    mask = sequence.get("attention_mask")
    return len(sequence["input_ids"]) if mask is None else int(torch.as_tensor(mask).sum())


def sample_tokens(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids`` and ``labels`` ``[tokens]`` of a sample, int64; without ``labels`` every token is a target.

    Raises:
        McaError: They are not integers in one dimension, or differ in length; or as `require_plain_sample`.
    """
    require_plain_sample(sample)
    tokens = _integers(sample["input_ids"], "input_ids")
    labels = _integers(sample["labels"], "labels") if "labels" in sample else tokens
    if len(labels) != len(tokens):
        raise McaError(
            f"a sample of the dataset has {counted(len(tokens), 'token')} and {counted(len(labels), 'label')}; give "
            "each token its label, not shifted, -100 where it is no target"
        )
    return tokens, labels


def _integers(values: Sample, name: str) -> torch.Tensor:
    tensor = torch.as_tensor(values)
    if tensor.ndim != 1:
        raise McaError(
            f"a sample of the dataset has {name} of shape {list(tensor.shape)}; expected one dimension, [tokens]; "
            "remove return_tensors from the tokenizer's call, or take its row 0"
        )
    if len(tensor):  # an empty list has no type
        require_integers(tensor, f"a sample of the dataset has {name}")
    return tensor.long()


def require_integers(tensor: torch.Tensor, found: str) -> None:
    """Raise a `McaError` that begins with ``found`` unless ``tensor`` has an integer type."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise McaError(f"{found} of type {tensor.dtype}; expected integers, ids of tokens")


def require_vocabulary(tokens: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> None:
    """Raise an error if a token or a label is none of the model's.

    Args:
        tokens: Tokens ``[s]`` without padding, or ``[b, s]`` with token 0 as padding.
        labels: Labels ``[s]`` or ``[b, s]``; `IGNORED` is allowed.
        vocab_size: Vocabulary size of the model without padding.

    Raises:
        McaError: One is outside the vocabulary: tensor-parallel embedding and cross entropy would take it for zeros.
    """
    for name, values, wrong in (
        ("token", tokens, (tokens < 0) | (tokens >= vocab_size)),
        ("label", labels, (labels < 0) & (labels != IGNORED) | (labels >= vocab_size)),
    ):
        if bool(wrong.any()):
            ignored = f", or {IGNORED} where the token is no target" if name == "label" else ""
            *sample, position = wrong.nonzero()[0].tolist()
            start = tokens[tuple(sample)][:_SHOWN].tolist()
            raise McaError(
                f"the sample that begins with the tokens {start} has {name} {int(values[wrong][0])} at position "
                f"{position}; expected 0 to {vocab_size - 1}, the vocabulary of the model{ignored}; use the tokenizer "
                "of the model"
            )


def require_plain_sample(sample: Sample) -> None:
    """Raise a `McaError` if columns define targets, padding or positions that would be ignored."""
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
            "a sample of the dataset has position_ids that do not count from 0; make each sequence a separate sample, "
            "and set sequence_packing to train several in one row"
        )


def collect_values(sequences: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the extra numbers of each sequence, zeros where one has none; empty if no sequence has any."""
    known = next((torch.as_tensor(each[VALUES]) for each in sequences if VALUES in each), None)
    if known is None:
        return []
    return [
        torch.as_tensor(each[VALUES]) if VALUES in each else torch.zeros_like(known) for each in sequences
    ]


def has_experts(sample: Sample) -> bool:
    """Return whether ``sample`` has experts."""
    return isinstance(sample, Mapping) and ROUTED_EXPERTS in sample


def without_experts(feature: Sample) -> Sample:
    """Return ``feature`` without its experts, which data collators cannot pad."""
    if not has_experts(feature):
        return feature
    return {name: value for name, value in feature.items() if name != ROUTED_EXPERTS}


def require_expert_rows(features: Sequence[Sample], num_tokens: torch.Tensor, *, shifted: bool) -> None:
    """Raise if a collator changed the tokens of samples with experts.

    Args:
        features: Samples of a micro-batch.
        num_tokens: Tokens of each row of the collator.
        shifted: Rows have one token less than samples.

    Raises:
        McaError: A row has another number of tokens than its sample.
    """
    for feature, tokens in zip(features, num_tokens.tolist(), strict=True):
        if has_experts(feature) and tokens != count_tokens(feature) - shifted:
            raise McaError(
                f"data_collator made a row of {tokens} tokens of a sample with {count_tokens(feature)}, whose "
                f"{ROUTED_EXPERTS!r} then belong to other tokens; let it keep all tokens, or remove the column"
            )
