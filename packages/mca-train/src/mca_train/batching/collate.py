"""Collators that pad, shift and slice samples into the tensors of a training step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mca_config.checks import require_learned_positions
from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.megatron.features.router_replay import LIVE, checked_experts
from mca_models.megatron.features.sequence_media import MediaJoiner, media_joiner
from mca_models.megatron.forward import row_multiple
from mca_models.megatron.layers.zigzag import take_rank_tokens
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import (
    ROUTED_EXPERTS,
    PackedSequence,
    collect_values,
    count_samples,
    count_tokens,
    has_experts,
    kl_sequence,
    pack_row,
    packing_multiple,
    pad_row,
    require_expert_rows,
    require_integers,
    require_vocabulary,
    row_length,
    sample_tokens,
    split_sequences,
    without_experts,
)
from mca_train.batching.sample_consistency import checksum, combine_checksums
from mca_train.data.token_dataset import IGNORED, VALUES
from mca_train.groups import Ranks
from mca_train.types import PreTrainedTokenizerBase, Sample, Upstream, VirtualModels

Collator = Callable[[list[JsonObject]], dict[str, Tensor]]

Cut = Callable[[Tensor, int], Tensor]
"""Function from a full tensor and an axis to the shard of this context-parallel rank."""

Sequences = list[tuple[Sample, bool]]
"""Sequences of a micro-batch, each with a flag that is False for sequences that do not count."""

_WHERE = f"{ROUTED_EXPERTS!r} of a sample"


@dataclass(frozen=True, kw_only=True)
class CollatorFormat:
    """Format of the batches of a user's ``data_collator``, or of the samples if there is none.

    Args:
        labels_are_shifted: Each position has the label of the next token, as in collators that return
            ``tokens[:-1]`` and ``labels[1:]``.
    """

    labels_are_shifted: bool = False


class PadCollator:
    """Collator that right-pads ``input_ids`` and ``labels`` to the longest sequence of the micro-batch.

    Without ``labels`` every token is a target.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: list[JsonObject]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels`` ``[b, s]``, ``num_tokens`` ``[b]`` without padding, and ``values``."""
        samples = [sample_tokens(_with_tokens(feature)) for feature in features]
        ids, labels = [tokens for tokens, _ in samples], [targets for _, targets in samples]
        values = collect_values(features)
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "num_tokens": torch.tensor([count_tokens(feature) for feature in features]),
            **({VALUES: torch.stack(values)} if values else {}),
        }


def _with_tokens(sample: Sample) -> Sample:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        has = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is {sample!r:.80}"
        raise McaError(
            f"a sample of the dataset {has}; expected 'input_ids', and 'labels' if not all are targets"
        )
    return sample


@dataclass(frozen=True, kw_only=True)
class ExpertBatching:
    """Check and batching of the experts of samples.

    Args:
        config: The model; None: its experts are not checked, and none may be given.
        required: Every sample must have experts.
    """

    config: McaModelConfig | None = None
    required: bool = False

    def checked(self, groups: Sequence[Sequences]) -> list[Sequences]:
        """Return the sequences of all micro-batches with their experts as int16 ``[tokens, layers, topk]``.

        Raises:
            McaError: Experts are wrong, or only some samples have them.
        """
        present = [has_experts(each) for group in groups for each, _ in group]
        if not all(present) and (self.required or any(present)):
            raise McaError(
                f"a sample of the dataset has no {ROUTED_EXPERTS!r}, which "
                f"{'this trainer requires' if self.required else 'other samples have'}; give each sample its experts, "
                f"{LIVE} for tokens without"
            )
        if not any(present):
            return [*groups]
        return [[(self._checked(each), counts) for each, counts in group] for group in groups]

    def _checked(self, sequence: Sample) -> Sample:
        if self.config is None:
            raise McaError(f"{_WHERE} is given, but the model of these batches is not known; remove it")
        experts = torch.as_tensor(sequence[ROUTED_EXPERTS])
        tokens = len(sequence["input_ids"])
        if experts.ndim != 3 or len(experts) != tokens:
            raise McaError(
                f"{_WHERE} has shape {list(experts.shape)} for {tokens} tokens; expected [{tokens}, layers, topk], "
                f"with {LIVE} for tokens without, such as the last one of an engine"
            )
        return {**sequence, ROUTED_EXPERTS: checked_experts(self.config, experts, _WHERE)}

    def add_experts(
        self, batch: MicroBatch, sequences: Sequences, lengths: Sequence[int], cut: Cut
    ) -> MicroBatch:
        """Return ``batch`` with the experts of ``sequences``, each padded to one of ``lengths``, packed or not."""
        found = [sequence[ROUTED_EXPERTS] for sequence, _ in sequences if has_experts(sequence)]
        if not found:
            return batch
        found += [found[0][:0]] * (len(lengths) - len(found))  # padding of a pack
        padded = [
            cut(pad(each[:length], (0, 0, 0, 0, 0, length - len(each[:length])), value=LIVE)[None], 1)
            for each, length in zip(found, lengths, strict=True)
        ]
        return replace(batch, routed_experts=torch.cat(padded, 1 if batch.cu_seqlens is not None else 0))


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of all batches of a model.

    Args:
        collate: Collator from the samples of a micro-batch to ``input_ids`` and ``labels`` ``[b, s]``, such as any
            Hugging Face collator for causal language models.
        collator_format: Format of its batches.
        pad_token_id: Padding token of the tokenizer.
        images: Joiner of images, videos and audio.
        experts: Check of the experts of samples.
        positions: Number of learned position embeddings; None: the model has none.
        vocab_size: Vocabulary size of the model without padding, to check tokens and labels; None: not checked.
        num_classes: Number of classes, one of which is the value of each sample; None: values are other numbers.
    """

    collate: Collator
    collator_format: CollatorFormat = field(default_factory=CollatorFormat)
    pad_token_id: int = 0
    images: MediaJoiner = field(default_factory=MediaJoiner)
    experts: ExpertBatching = field(default_factory=ExpertBatching)
    positions: int | None = None
    vocab_size: int | None = None
    num_classes: int | None = None


def model_options(models: VirtualModels, ranks: Ranks, *, requires_experts: bool = False) -> JsonObject:
    """Return the `BatchOptions` that depend on the model only, by name."""
    config = models.config
    return {
        "images": media_joiner(config, decodes=ranks.is_first_stage),
        "experts": ExpertBatching(config=config, required=requires_experts),
        "positions": config.max_position_embeddings if config.embedding.learned_positions else None,
        "vocab_size": config.vocab_size,
    }


@dataclass(frozen=True, kw_only=True)
class StepCollator(BatchOptions):
    """Collator from a rank's samples of one step to a `StepBatch`.

    Args:
        micro_batch_size: Samples per micro-batch.
        multiple: The padded length is a multiple of this (tensor and context parallel sizes, fp8).
        context_parallel_size: Ranks that share a sample.
        context_parallel_rank: Rank in the context-parallel group.
        length: Minimum padded length; None: the longest sequence of the step.
        packed: Pack the sequences of a micro-batch into one row, with attention within each sequence only.
    """

    micro_batch_size: int
    multiple: int = 1
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    length: int | None = None
    packed: bool = False

    @classmethod
    def for_rank(
        cls,
        options: BatchOptions,
        ranks: Ranks,
        megatron: Upstream,
        *,
        micro_batch_size: int,
        packed: bool,
        length: int | None = None,
    ) -> "StepCollator":
        """Return the collator of a rank for a model with Megatron's ``TransformerConfig``."""
        return cls(
            **{option.name: getattr(options, option.name) for option in fields(BatchOptions)},
            micro_batch_size=micro_batch_size,
            multiple=row_multiple(ranks.layout, megatron, ranks.device, packed=packed),
            context_parallel_size=ranks.layout.cp,
            context_parallel_rank=ranks.context_parallel_rank,
            length=length,
            packed=packed,
        )

    def __call__(self, samples: Sequence[tuple[Sample, bool]]) -> StepBatch:
        """Collate the ``(sample, counts)`` pairs of this rank."""
        batch = self._step_batch(samples)
        kl_samples = [(kl_sequence(sample), counts) for sample, counts in samples]
        if not kl_samples[0][0]:
            return batch
        kl_batch = self._step_batch(kl_samples)
        return replace(
            batch, kl_batch=kl_batch, checksum=combine_checksums(batch.checksum, kl_batch.checksum)
        )

    def _step_batch(self, samples: Sequence[tuple[Sample, bool]]) -> StepBatch:
        size = self.micro_batch_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        flat = self.experts.checked([_split_samples(group) for group in groups])
        micro_batches, lengths, digest = self._pack(flat) if self.packed else self._pad_batches(flat)
        if self.positions is not None:
            require_learned_positions(max(lengths), self.positions)
        experts = [sequence[ROUTED_EXPERTS] for sequence, _ in chain(*flat) if has_experts(sequence)]
        if experts:
            digest = combine_checksums(digest, checksum(experts))
        micro_batches = tuple(
            self._add_sequence_data(batch, group) for batch, group in zip(micro_batches, flat, strict=True)
        )
        if self.num_classes is not None:
            for batch in micro_batches:
                _require_classes(batch.values, self.num_classes)
        return StepBatch(
            micro_batches=micro_batches,
            seq_length=micro_batches[0].input_ids.shape[1] * self.context_parallel_size,
            num_samples=sum(count_samples(sample) for sample, counts in samples if counts),
            num_tokens=sum(lengths),
            squares=sum(length * length for length in lengths),
            checksum=digest,
        )

    def _add_sequence_data(self, batch: MicroBatch, group: Sequences) -> MicroBatch:
        """Return ``batch`` with the sources, the images and the experts of its sequences."""
        if batch.cu_seqlens is None:
            lengths = [batch.input_ids.shape[1] * self.context_parallel_size] * len(group)
        else:
            lengths = batch.cu_seqlens.diff().tolist()
        batch = self.experts.add_experts(_with_sources(batch, group), group, lengths, self._slice)
        return add_media(batch, self.images, group, lengths, self._slice)

    def _padded_length(self, lengths: Sequence[int]) -> int:
        """Return the padded length of all rows of a step."""
        longest = max(*lengths, self.length or 0)
        return longest + -longest % self.multiple

    def _pad_batches(self, groups: Sequence[Sequences]) -> tuple[tuple[MicroBatch, ...], list[int], int]:
        """Return the micro-batches, the number of counted tokens per sequence, and the checksum over all tokens."""
        is_pad_collator = isinstance(self.collate, PadCollator)  # pads each row independently
        batches = [self._collate(group) for group in ([[*chain(*groups)]] if is_pad_collator else groups)]
        widths = [batch["input_ids"].shape[1] for batch in batches]
        length = self._padded_length(widths)
        if self.length is not None and length > self._padded_length([self.length]):
            raise McaError(
                f"data_collator made rows of {max(widths)} tokens, the longest sample has {self.length}; MoE layers "
                "need equally long rows on all ranks; remove pad_to_multiple_of from it, and anything that adds tokens"
            )
        sizes = (
            [len(group) for group in groups]
            if is_pad_collator
            else [len(batch["input_ids"]) for batch in batches]
        )
        lengths = [int(tokens) for batch in batches for tokens in batch["num_tokens"]]
        digest = checksum(batch[name] for batch in batches for name in ("input_ids", "labels"))
        return self._micro_batches(batches, length, sizes), lengths, digest

    def _pack(self, groups: Sequence[Sequences]) -> tuple[tuple[MicroBatch, ...], list[int], int]:
        """Return the micro-batches, the number of counted tokens per sequence, and the checksum over all tokens."""
        multiple = packing_multiple(self.context_parallel_size)
        rows = [pack_row(group, multiple, self.pad_token_id) for group in groups]
        if self.vocab_size is not None:
            for sequence in chain(*rows):
                own = sequence.input_ids[: sequence.num_tokens]
                require_vocabulary(own, sequence.labels, self.vocab_size)
        length = self._padded_length([row_length(row) for row in rows])
        rows = [pad_row(row, length, self.pad_token_id) for row in rows]
        num_tokens = [sequence.num_tokens for row in rows for sequence in row]
        digest = checksum(
            tokens
            for row in rows
            for tokens in (*(each.input_ids for each in row), *(each.labels for each in row))
        )
        return tuple(self._packed_micro_batch(row) for row in rows), num_tokens, digest

    def _packed_micro_batch(self, row: list[PackedSequence]) -> MicroBatch:
        """Return a row of packed sequences as ``[1, s / cp]`` tensors; each sequence is split over context ranks."""
        lengths = [len(sequence.input_ids) for sequence in row]

        def join(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([self._slice(tensor[None]) for tensor in tensors], 1)

        next_labels = join(self._next_labels(sequence.labels[None])[0] for sequence in row)
        mask = next_labels != IGNORED
        values = [sequence.values for sequence in row if sequence.values is not None]
        sized = [*zip(row, lengths, strict=True)]
        return MicroBatch(
            input_ids=join(sequence.input_ids for sequence in row),
            position_ids=join(self._position_ids(length) * (each.num_tokens > 0) for each, length in sized),
            labels=next_labels.masked_fill(~mask, 0),
            loss_mask=mask.float(),
            segments=join(torch.full((length,), number) for number, length in enumerate(lengths)),
            num_segments=len(row),
            tokens_remaining=join(each.num_tokens - 1 - torch.arange(length) for each, length in sized),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            longest=max(sequence.num_tokens for sequence in row),
            max_seqlen=max(lengths),
            values=torch.stack(values) if values else None,
        )

    def _collate(self, group: Sequences) -> dict[str, Tensor]:
        """Return the collator's ``input_ids`` and ``labels`` ``[b, s]`` and ``num_tokens`` ``[b]``, checked.

        Sequences that do not count have no targets and no tokens.
        """
        features = [feature for feature, _ in group]
        batch = dict(self.collate([without_experts(feature) for feature in features]))
        for name in ("input_ids", "labels", VALUES):
            if not isinstance(batch.get(name, batch.get("input_ids")), Tensor):
                raise McaError(f"data_collator made no tensor {name!r}, only {', '.join(batch)}")
        counts = torch.tensor([real for _, real in group])
        if "num_tokens" not in batch:
            batch["num_tokens"] = _count_row_tokens(batch, features)
        require_expert_rows(features, batch["num_tokens"], shifted=self.collator_format.labels_are_shifted)
        if "labels" not in batch and any("labels" in feature for feature in features):
            raise McaError(
                "data_collator made no labels, which samples of the dataset have; return them, -100 where a token is "
                "no target"
            )
        padding = torch.arange(batch["input_ids"].shape[1]) >= batch["num_tokens"][:, None]
        labels = batch["labels"] if "labels" in batch else batch["input_ids"].masked_fill(padding, IGNORED)
        self._require_tokens(batch["input_ids"].masked_fill(padding, 0), labels)
        batch["labels"] = labels.masked_fill(~counts[:, None], IGNORED)
        batch["num_tokens"] = batch["num_tokens"] * counts
        if VALUES not in batch and (values := collect_values(features)):
            batch[VALUES] = torch.stack(values)
        return batch

    def _require_tokens(self, ids: Tensor, labels: Tensor) -> None:
        """Raise a `McaError` unless rows ``ids`` with padding 0 have labels of their shape, of the vocabulary."""
        if labels.shape != ids.shape:
            raise McaError(
                f"data_collator made labels of shape {list(labels.shape)} for input_ids of {list(ids.shape)}; expected "
                "equal shapes: one label per token, not shifted unless collator_format says so"
            )
        for name, tensor in (("input_ids", ids), ("labels", labels)):
            require_integers(tensor, f"data_collator made {name}")
        if self.vocab_size is not None:
            require_vocabulary(ids.long(), labels.long(), self.vocab_size)

    def _micro_batches(
        self, batches: list[dict[str, Tensor]], length: int, sizes: list[int]
    ) -> tuple[MicroBatch, ...]:
        """Split the collated batches of a step into micro-batches of ``sizes`` samples."""
        ids = torch.cat([_pad(batch["input_ids"], length, self.pad_token_id) for batch in batches])
        labels = torch.cat([_pad(batch["labels"], length, IGNORED) for batch in batches])
        labels = self._next_labels(labels)
        num_tokens = torch.cat([batch["num_tokens"] for batch in batches])
        segments = torch.cat([torch.arange(size) for size in sizes])
        positions = torch.arange(length).expand_as(ids)
        mask = labels != IGNORED
        whole = {
            "input_ids": ids,
            "position_ids": self._position_ids(length).expand_as(ids),
            "labels": labels.masked_fill(~mask, 0),
            "loss_mask": mask.float(),
            "segments": segments[:, None].expand_as(ids),
            "tokens_remaining": num_tokens[:, None] - 1 - positions,
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
        """Return labels ``[b, s]`` of the next token."""
        return labels if self.collator_format.labels_are_shifted else shift_labels(labels)

    def _position_ids(self, length: int) -> Tensor:
        """Return the positions of a padded sequence, clamped to the number of learned positions."""
        positions = torch.arange(length)
        return positions if self.positions is None else positions.clamp(max=self.positions - 1)

    def _slice(self, whole: Tensor, axis: int = 1) -> Tensor:
        """Return this context rank's two of ``2 cp`` parts of ``axis``."""
        return take_rank_tokens(
            whole, axis, self.context_parallel_rank, self.context_parallel_size
        ).contiguous()


def _count_row_tokens(batch: Mapping[str, Tensor], features: Sequence[Sample]) -> Tensor:
    """Count the tokens of each row without padding, from ``attention_mask`` or from the lengths of the samples."""
    ids = batch["input_ids"]
    if len(ids) != len(features):
        raise McaError(
            f"data_collator made {counted(len(ids), 'row')} of {counted(len(features), 'sample')}; expected one row "
            "per sample"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids))
    _require_right_padding(batch, mask)
    if "attention_mask" in batch:
        return mask.sum(1)
    samples = [torch.as_tensor(feature.get("input_ids", ())).long() for feature in features]
    lengths = [
        count_tokens(feature) if len(tokens) else 0 for feature, tokens in zip(features, samples, strict=True)
    ]
    for row, tokens, length in zip(ids, samples, lengths, strict=True):
        if length < len(row) and not (length and torch.equal(row[:length], tokens[:length])):
            raise McaError(
                "data_collator made no attention_mask, and its rows have other tokens than the samples, so "
                "padding is not known; return attention_mask"
            )
    return torch.tensor(lengths).clamp(max=ids.shape[1])


def _require_right_padding(batch: Mapping[str, Tensor], mask: Tensor) -> None:
    """Raise a `McaError` unless each row of the collator is one sample followed by masked padding."""
    ids = batch["input_ids"]
    if mask.shape != ids.shape or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise McaError(
            "data_collator made rows with padding before tokens, or an attention_mask that is not [samples, tokens]; "
            "set padding_side of its tokenizer to 'right'"
        )
    places = batch.get("position_ids", torch.arange(ids.shape[1]))
    if places.shape == ids.shape and bool(((places != torch.arange(ids.shape[1])) & (mask > 0)).any()):
        raise McaError(
            "data_collator made position_ids that do not count from 0, which suggests several samples in one row; "
            "remove it and set sequence_packing"
        )


def _require_classes(values: Tensor | None, count: int) -> None:
    """Raise a `McaError` unless the first value of each sequence, if it has any, is one of ``count`` classes."""
    if values is None:
        return
    classes = values[:, 0]
    wrong = (classes < 0) | (classes >= count) | (classes != classes.floor())
    if bool(wrong.any()):
        raise McaError(
            f"a sample of the dataset has class {float(classes[wrong][0]):g} in 'values'; expected a whole number from "
            f"0 to {count - 1}, the labels of the model's head; leave out samples without a class"
        )


def _with_sources(batch: MicroBatch, sequences: Sequences) -> MicroBatch:
    """Return ``batch`` with the source of each sequence, if the dataset is a mixture."""
    if not all("source" in sequence for sequence, _ in sequences):
        return batch
    return replace(batch, sources=torch.stack([sequence["source"] for sequence, _ in sequences]))


def add_media(
    batch: MicroBatch, joiner: MediaJoiner, sequences: Sequences, lengths: Sequence[int], cut: Cut
) -> MicroBatch:
    """Return ``batch`` with the images and the audio of ``sequences``, each padded to one of ``lengths``.

    Sequences that do not count keep their media, but their placeholders are not counted.
    """
    found = [sequence["images"] if "images" in sequence else None for sequence, _ in sequences]
    if not any(found):
        return batch
    counted_places = [
        place
        for media, (_, counts) in zip(found, sequences, strict=True)
        for place in (media.places if media and counts else ())
    ]
    image_tokens, audio_tokens = (
        sum(place.tokens for place in counted_places if place.medium == medium)
        for medium in ("image", "audio")
    )
    made = joiner.join(found, lengths, cut, packed=batch.cu_seqlens is not None)
    return replace(
        batch,
        image_tokens=image_tokens,
        audio_tokens=audio_tokens,
        sections=made.sections,
        attention_ends=made.attention_ends,
        feature_rows=made.feature_rows,
        images=made.images,
        has_media=True,
    )


def _split_samples(samples: Sequence[tuple[Sample, bool]]) -> Sequences:
    return [(sequence, counts) for sample, counts in samples for sequence in split_sequences(sample)]


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels ``[b, s]`` left by one position, so that each is the next token; the last one is ignored."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def _pad(values: Tensor, length: int, value: int) -> Tensor:
    return pad(values, (0, length - values.shape[1]), value=value)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or EOS; padding is neither attended to nor a target, so any token works."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0
