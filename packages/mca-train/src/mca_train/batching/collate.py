"""Samples to the tensors of a training step: padded, shifted, and sliced for context parallelism."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mca_config.checks import require_learned
from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.megatron.layers.zigzag import take
from mca_train.batching.collator_output import (
    CollatorFormat,
    images_of_rows,
    interleave_pairs,
    pair_order,
    split_rows,
)
from mca_train.batching.image_batch import ImageBatching
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import (
    Row,
    count_samples,
    other_sequence,
    own_tokens,
    require_own_targets,
    row_of,
    sequences_of,
    values_of,
)
from mca_train.batching.same_samples import checksum, joined
from mca_train.data.sample_images import SampleImages
from mca_train.data.token_dataset import IGNORED, VALUES
from mca_train.types import PreTrainedTokenizerBase, Sample, SampleSource

Collator = Callable[[list[JsonObject]], dict[str, Tensor]]

Sequences = list[tuple[Sample, bool]]
"""Sequences of a micro-batch, and whether each counts."""


class PadCollator:
    """Pads ``input_ids`` and ``labels`` on the right to the longest of the micro-batch.

    Without ``labels`` every token is a target.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: list[JsonObject]) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` ``[b, s]``, ``num_tokens`` ``[b]`` without padding, and samples' ``values``."""
        ids = [torch.as_tensor(_tokens(feature)).long() for feature in features]
        for feature in features:
            require_own_targets(feature)
        labels = [torch.as_tensor(feature.get("labels", feature["input_ids"])).long() for feature in features]
        pad = torch.nn.utils.rnn.pad_sequence
        values = values_of(features)
        return {
            "input_ids": pad(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad(labels, batch_first=True, padding_value=IGNORED),
            "num_tokens": torch.tensor([own_tokens(feature) for feature in features]),
            **({VALUES: torch.stack(values)} if values else {}),
        }


def _tokens(sample: Sample) -> Sample:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        has = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is {sample!r:.80}"
        raise McaError(
            f"a sample of the dataset {has}; expected 'input_ids', and 'labels' if not all are targets"
        )
    return sample["input_ids"]


class CountedSamples(Dataset[tuple[Sample, bool]]):
    """A dataset whose index ``~i`` is sample ``i`` again, marked as one that does not count."""

    def __init__(self, dataset: SampleSource) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Sample, bool]:
        return self._dataset[max(index, ~index)], index >= 0

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Sample, bool]]:
        return [self[index] for index in indices]


@dataclass(frozen=True, kw_only=True)
class StepCollator:
    """Makes a `StepBatch` of the samples that a rank has in a step.

    Args:
        collate: Makes ``input_ids`` and ``labels`` (not shifted) ``[b, s]`` of the samples of a micro-batch;
            any Hugging Face collator for causal language models does.
        collator_format: How these are read.
        micro_batch_size: Samples per micro-batch.
        multiple: The padded length is a multiple of this (tensor and context parallel sizes, fp8).
        context_parallel_size: Ranks that share a sample.
        context_parallel_rank: This one.
        length: Pad to at least this; None: to the longest of the step.
        packed: The sequences of a micro-batch stand one after another in one row, kept apart by attention. A
            collator other than `PadCollator` numbers those of a row in ``attention_mask``.
        images: How images are taken.
        positions: How many the model has learned; None: it takes any.
    """

    collate: Collator
    micro_batch_size: int
    collator_format: CollatorFormat = field(default_factory=CollatorFormat)
    multiple: int = 1
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    length: int | None = None
    pad_token_id: int = 0
    packed: bool = False
    images: ImageBatching = field(default_factory=ImageBatching)
    positions: int | None = None

    def __call__(self, samples: Sequence[tuple[Sample, bool]]) -> StepBatch:
        """The step's batch, from ``(sample, whether it counts)`` of this rank."""
        batch = self._step(samples)
        others = [(other_sequence(sample), counts) for sample, counts in samples]
        if not others[0][0]:
            return batch
        beside = self._step(others)
        return replace(batch, beside=beside, checksum=joined(batch.checksum, beside.checksum))

    def _step(self, samples: Sequence[tuple[Sample, bool]]) -> StepBatch:
        size = self.micro_batch_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        flat, batches = [_sequences(group) for group in groups], None
        if not isinstance(self.collate, PadCollator):
            batches, flat = self._collated_all(groups, flat)
        made, lengths, tokens = self._packed(flat) if self.packed else self._padded(flat, batches)
        if self.positions is not None:
            require_learned(max(lengths), self.positions)
        made = tuple(self._completed(batch, group) for batch, group in zip(made, flat, strict=True))
        return StepBatch(
            micro_batches=made,
            seq_length=made[0].input_ids.shape[1] * self.context_parallel_size,
            num_samples=sum(count_samples(sample) for sample, counts in samples if counts),
            num_tokens=sum(lengths),
            squares=sum(length * length for length in lengths),
            checksum=tokens,
        )

    def _completed(self, batch: MicroBatch, group: Sequences) -> MicroBatch:
        """``batch`` with what else its sequences have: sources and images."""
        if batch.cu_seqlens is None:
            lengths = [batch.input_ids.shape[1] * self.context_parallel_size] * len(group)
        else:
            lengths = batch.cu_seqlens.diff().tolist()
        return self.images.added(_with_sources(batch, group), group, lengths, self._slice)

    def _length(self, lengths: Sequence[int]) -> int:
        """What all rows of a step are padded to."""
        longest = max(*lengths, self.length or 0)
        return longest + -longest % self.multiple

    def _collated_all(
        self, groups: Sequence[Sequences], flat: Sequence[Sequences]
    ) -> tuple[list[dict[str, Tensor]], list[Sequences]]:
        """Return the batches of a user's collator, and the sequences in their rows with their images."""
        batches, sequences = [], []
        for group, single in zip(groups, flat, strict=True):
            batch = self._collated(group if self.collator_format.takes_pairs else single)
            images = images_of_rows(batch, self.images.format)
            if self.collator_format.takes_pairs:
                images = [images[row] for row in pair_order(len(images))]
                batch = interleave_pairs(batch)
            batch |= _row_counts(batch, single, packed=self.packed)
            batches.append(batch)
            counts = [real for _, real in single]
            if self.packed:
                sequences.append([*split_rows(batch, images, counts)])
            else:
                sequences.append(_with_images(single, images))
        return batches, sequences

    def _padded(
        self, groups: Sequence[Sequences], batches: list[dict[str, Tensor]] | None = None
    ) -> tuple[tuple[MicroBatch, ...], list[int], int]:
        """The micro-batches, how many tokens each sequence has that count, and the checksum of all."""
        own = batches is None  # rows of `PadCollator` do not depend on one another
        if batches is None:
            everything = [*chain(*groups)]
            batches = [self._collated(everything)]
            batches[0] |= _row_counts(batches[0], everything, packed=False)
        widths = [batch["input_ids"].shape[1] for batch in batches]
        length = self._length(widths)
        if self.length is not None and length > self._length([self.length]):
            raise McaError(
                f"data_collator made rows of {max(widths)} tokens, the longest sample has {self.length}; experts get "
                "equally many of all ranks here: leave out its pad_to_multiple_of, and what adds tokens"
            )
        sizes = [len(group) for group in groups] if own else [len(batch["input_ids"]) for batch in batches]
        lengths = [int(tokens) for batch in batches for tokens in batch["num_tokens"]]
        whole = checksum(batch[name] for batch in batches for name in ("input_ids", "labels"))
        return self._micro_batches(batches, length, sizes), lengths, whole

    def _packed(self, groups: Sequence[Sequences]) -> tuple[tuple[MicroBatch, ...], list[int], int]:
        """The micro-batches, how many tokens each sequence has that count, and the checksum of all."""
        size = self.context_parallel_size
        multiple = 2 * size if size > 1 else 1
        rows = [row_of(group, multiple, self.pad_token_id, IGNORED) for group in groups]
        length = self._length([row.length for row in rows])
        padded = [row.padded(length, self.pad_token_id, IGNORED) for row in rows]
        own = [tokens for row in rows for tokens in row.own_tokens]
        whole = checksum(tokens for row in padded for tokens in (*row.input_ids, *row.labels))
        return tuple(self._packed_micro_batch(row) for row in padded), own, whole

    def _packed_micro_batch(self, row: Row) -> MicroBatch:
        lengths = [len(ids) for ids in row.input_ids]
        labels = [self._next_labels(labels[None]) for labels in row.labels]

        def join(sequences: Sequence[Tensor]) -> Tensor:
            return torch.cat([self._slice(sequence) for sequence in sequences], 1)

        following = join(labels)
        mask = following != IGNORED
        return MicroBatch(
            input_ids=join([ids[None] for ids in row.input_ids]),
            position_ids=join(
                [self._places(n)[None] * (own > 0) for n, own in zip(lengths, row.own_tokens, strict=True)]
            ),
            labels=following.masked_fill(~mask, 0),
            loss_mask=mask.float(),
            segments=join([torch.full((1, length), number) for number, length in enumerate(lengths)]),
            num_segments=len(lengths),
            following=join(
                [
                    own - 1 - torch.arange(length)[None]
                    for own, length in zip(row.own_tokens, lengths, strict=True)
                ]
            ),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            longest=max(row.own_tokens),
            max_seqlen=max(lengths),
            values=torch.stack(row.values) if row.values else None,
        )

    def _collated(self, samples: Sequence[tuple[Sample, bool]]) -> dict[str, Tensor]:
        batch = dict(self.collate([sample for sample, _ in samples]))
        for name in ("input_ids", "labels", VALUES):
            if not isinstance(batch.get(name, batch.get("input_ids")), Tensor):
                raise McaError(f"data_collator made no tensor {name!r}, only {', '.join(batch)}")
        return batch

    def _micro_batches(
        self, batches: list[dict[str, Tensor]], length: int, sizes: list[int]
    ) -> tuple[MicroBatch, ...]:
        """Those of a step, made together and then cut into ``sizes`` samples each."""
        ids = torch.cat([_pad(batch["input_ids"], length, self.pad_token_id) for batch in batches])
        labels = self._next_labels(torch.cat([_pad(batch["labels"], length, IGNORED) for batch in batches]))
        num_tokens = torch.cat([batch["num_tokens"] for batch in batches])
        segments = torch.cat([torch.arange(size) for size in sizes])
        positions = torch.arange(length).expand_as(ids)
        mask = labels != IGNORED
        whole = {
            "input_ids": ids,
            "position_ids": self._places(length).expand_as(ids),
            "labels": labels.masked_fill(~mask, 0),
            "loss_mask": mask.float(),
            "segments": segments[:, None].expand_as(ids),
            "following": num_tokens[:, None] - 1 - positions,
        }
        cut = {name: self._slice(values).split(sizes) for name, values in whole.items()}
        if (known := next((batch[VALUES] for batch in batches if VALUES in batch), None)) is not None:
            none = [known.new_zeros(len(batch["input_ids"]), *known.shape[1:]) for batch in batches]
            values = [batch.get(VALUES, zeros) for batch, zeros in zip(batches, none, strict=True)]
            cut[VALUES] = torch.cat(values).split(sizes)
        return tuple(
            MicroBatch(
                num_segments=size,
                longest=int(own.max()),
                **{name: parts[number] for name, parts in cut.items()},
            )
            for number, (size, own) in enumerate(zip(sizes, num_tokens.split(sizes), strict=True))
        )

    def _next_labels(self, labels: Tensor) -> Tensor:
        """Return the label of the next token for each position of ``labels`` ``[b, s]``."""
        return labels if self.collator_format.labels_are_shifted else shift_labels(labels)

    def _places(self, length: int) -> Tensor:
        """Positions of a sequence and its padding, which may be longer than what a model has learned."""
        places = torch.arange(length)
        return places if self.positions is None else places.clamp(max=self.positions - 1)

    def _slice(self, whole: Tensor, axis: int = 1) -> Tensor:
        return take(whole, axis, self.context_parallel_rank, self.context_parallel_size).contiguous()


def _row_counts(batch: Mapping[str, Tensor], sequences: Sequences, *, packed: bool) -> dict[str, Tensor]:
    """Return labels and values of a collator's rows, and their tokens without padding; 0 of one that does not count."""
    features, counts = [sequence for sequence, _ in sequences], torch.tensor([real for _, real in sequences])
    tokens = batch["num_tokens"] if "num_tokens" in batch else _tokens_of_rows(batch, features, packed=packed)
    if "labels" not in batch and any("labels" in feature for feature in features):
        raise McaError(
            "data_collator made no labels, which samples of the dataset have; return them, -100 where a token is "
            "no target"
        )
    padding = torch.arange(batch["input_ids"].shape[1]) >= tokens[:, None]
    labels = batch["labels"] if "labels" in batch else batch["input_ids"].masked_fill(padding, IGNORED)
    made = {"labels": labels.masked_fill(~counts[:, None], IGNORED), "num_tokens": tokens * counts}
    if VALUES not in batch and (values := values_of(features)):
        made[VALUES] = torch.stack(values)
    return made


def _with_images(sequences: Sequences, images: Sequence[SampleImages | None]) -> Sequences:
    """Return ``sequences`` with the images that a collator has read, where it has."""
    made = []
    for (sequence, counts), found in zip(sequences, images, strict=True):
        given = sequence.get("images")
        if given and found is None and not isinstance(given, SampleImages):
            raise McaError(
                "a sample of the dataset has images, and data_collator made no pixel_values; return them and "
                "image_grid_thw, as the model's processor does"
            )
        known = found or (given if isinstance(given, SampleImages) else None)
        rest = {name: value for name, value in sequence.items() if name != "images"}
        made.append((rest | ({} if known is None else {"images": known}), counts))
    return made


def _tokens_of_rows(batch: Mapping[str, Tensor], features: Sequence[Sample], *, packed: bool) -> Tensor:
    """How many tokens of each row of a collator are no padding: by its ``attention_mask``, or by the samples."""
    ids = batch["input_ids"]
    if len(ids) != len(features):
        raise McaError(
            f"data_collator made {counted(len(ids), 'row')} of {counted(len(features), 'sample')}; make one row of each"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids))
    if packed:
        return (mask > 0).sum(-1)
    _require_own_rows(batch, mask)
    if "attention_mask" in batch:
        return mask.sum(-1)
    own = [torch.as_tensor(feature.get("input_ids", ())).long() for feature in features]
    lengths = [
        own_tokens(feature) if len(tokens) else 0 for feature, tokens in zip(features, own, strict=True)
    ]
    for row, tokens, length in zip(ids, own, lengths, strict=True):
        if length < len(row) and not (length and torch.equal(row[:length], tokens[:length])):
            raise McaError(
                "data_collator made no attention_mask, and rows of other tokens than the samples have, so that "
                "padding is not known; return attention_mask"
            )
    return torch.tensor(lengths).clamp(max=ids.shape[1])


def _require_own_rows(batch: Mapping[str, Tensor], mask: Tensor) -> None:
    """Raises unless each row of a collator is one sample and then its padding, which no token attends to."""
    ids = batch["input_ids"]
    if mask.shape != ids.shape or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise McaError(
            "data_collator made rows with padding before tokens, or an attention_mask that is not [samples, tokens]; "
            "set padding_side of its tokenizer to 'right'"
        )
    places = batch.get("position_ids", torch.arange(ids.shape[1]))
    if places.shape == ids.shape and bool(((places != torch.arange(ids.shape[1])) & (mask > 0)).any()):
        raise McaError(
            "data_collator made position_ids that do not count from 0, as of several samples in one row; leave it "
            "out and set sequence_packing"
        )


def _with_sources(batch: MicroBatch, sequences: Sequences) -> MicroBatch:
    """``batch`` with the source of each sequence, if the dataset is a mixture."""
    if not all("source" in sequence for sequence, _ in sequences):
        return batch
    return replace(batch, sources=torch.stack([sequence["source"] for sequence, _ in sequences]))


def _sequences(samples: Sequence[tuple[Sample, bool]]) -> Sequences:
    return [(sequence, counts) for sample, counts in samples for sequence in sequences_of(sample)]


def shift_labels(labels: Tensor) -> Tensor:
    """Labels ``[b, s]`` of each position to those of the position before: the next token; none at the end."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def _pad(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=value)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token; any token does, as padding is neither attended to nor a target."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0
