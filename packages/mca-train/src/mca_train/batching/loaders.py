"""Data loaders that hand out whole steps."""

import logging
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace

import torch
from torch.utils.data import DataLoader

from mca_config.checks import sequence_multiple, step_of_lengths, tokens_of_fp8
from mca_config.errors import McaError, UsageError
from mca_config.printable import counted
from mca_train.batching.collate import Collator, CountedSamples, PadCollator, StepCollator
from mca_train.batching.collator_output import CollatorFormat
from mca_train.batching.image_batch import ImageBatching
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.packing import PackedDataset, longest_sample
from mca_train.batching.position import RunPosition
from mca_train.batching.sampling import SAMPLES, BatchShape, StepSampler
from mca_train.batching.step_stream import PackedStream, StepStream, is_stream, require_steps, require_whole
from mca_train.data.streams import AnswerStream
from mca_train.data.token_dataset import order_of
from mca_train.groups import Ranks
from mca_train.types import Sample, SampleSource, TrainingArguments, Upstream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Makes the training and evaluation loaders of this rank.

    Args:
        args: Training arguments.
        ranks: Where this rank stands.
        megatron: Megatron's configuration of the model.
        collate: Makes padded tensors of samples.
        collator_format: How these are read.
        pad_token_id: Of the tokenizer.
        pack_length: With ``sequence_packing``, tokens of a pack; None: of the longest sample.
        images: How images are taken.
        positions: How many the model has learned; None: it takes any.
    """

    args: TrainingArguments
    ranks: Ranks
    megatron: Upstream
    collate: Collator
    pad_token_id: int
    pack_length: int | None = None
    collator_format: CollatorFormat = field(default_factory=CollatorFormat)
    images: ImageBatching = field(default_factory=ImageBatching)
    positions: int | None = None
    _packs: dict[int, dict[int | None, PackedDataset]] = field(default_factory=dict)
    _read: dict[int, tuple[Sample, list[Sample]]] = field(default_factory=dict)

    @property
    def _packs_samples(self) -> bool:
        """Whether packs are made here; with a data_collator the samples of a dataset are packed already."""
        return self.args.sequence_packing and isinstance(self.collate, PadCollator)

    def keep_only(self, datasets: Iterable[object]) -> None:
        """Lets go of packs, and of streams that were read, of other datasets than these."""
        kept = {id(dataset) for dataset in datasets}
        for made in (self._packs, self._read):
            for key in made.keys() - kept:
                del made[key]

    def train(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepSampler | StepStream]:
        """An item is a step; the sampler says which epoch and where in it to begin."""
        args = self.args
        if is_stream(dataset):
            return self._of_stream(dataset)
        length, units = _length(dataset, "train_dataset"), SAMPLES
        is_random = str(args.train_sampling_strategy) == "random"
        seed = (args.seed if args.data_seed is None else args.data_seed) if is_random else None
        drawn = "not shuffled" if seed is None else f"shuffled by seed {seed}"
        order = ", ".join(filter(None, (order_of(dataset), drawn)))
        if self._packs_samples:
            dataset = self._packed(dataset, "train_dataset", seed)
            length, units = len(dataset), dataset.units
        sampler = StepSampler(
            length,
            self._shape(args.per_device_train_batch_size, args.gradient_accumulation_steps),
            seed=seed,
            drop_last=args.dataloader_drop_last,
            units=units,
            order=order,
        )
        return self._of_samples(dataset, sampler), sampler

    def _of_stream(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepStream]:
        args = self.args
        require_steps(dataset, args.max_steps)
        require_whole(dataset, "train_dataset")
        if found := self._needs_one_length():
            raise McaError(
                f"{found[0]} needs samples of one length on all ranks, which a stream does not guarantee; set it to "
                f"{found[1]}"
            )
        shape = self._shape(args.per_device_train_batch_size, args.gradient_accumulation_steps)
        rows, make = (dataset.rows, dataset.make) if isinstance(dataset, AnswerStream) else (dataset, None)
        units = SAMPLES
        if self._packs_samples:
            if self.pack_length is None:
                raise McaError(
                    "sequence_packing of a stream needs pack_length: its longest sample is not known"
                )
            rows = PackedStream(rows, self.pack_length, multiple=self._sequence_multiple(), make=make)
            make, units = None, rows.units
        stream = StepStream(
            rows,
            shape,
            args.max_steps,
            make=make,
            drop_last=args.dataloader_drop_last,
            units=units,
            order=order_of(dataset),
        )
        return self._loader(stream, stream, None), stream

    def _common_length(self, dataset: SampleSource, shape: BatchShape) -> int | None:
        """What all rows are padded to where ranks with different ones send experts equally many tokens."""
        if not self._needs_one_length():
            return None
        longest = dataset.fill.length if isinstance(dataset, PackedDataset) else longest_sample(dataset)
        return (
            shape.micro_batch_size * longest if self.args.sequence_packing else longest
        )  # packs are one row

    def _needs_one_length(self) -> tuple[str, str] | None:
        """What has experts get the same number of tokens of several replicas, and what it can be set to instead."""
        layout = self.ranks.layout
        if layout.ep == 1 and layout.etp <= layout.tp:
            return None
        if self.megatron.moe_token_dispatcher_type == "allgather":
            return "moe_token_dispatcher_type allgather", "alltoall"
        filled = self.megatron.moe_pad_expert_input_to_capacity
        return ("moe_pad_expert_input_to_capacity", "false") if filled else None

    def evaluation(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepSampler]:
        """An item is as many micro-batches as fill the pipeline; every sample comes once, in order."""
        pipeline = self.ranks.layout.pp
        shape = self._shape(self.args.per_device_eval_batch_size, pipeline)
        if is_stream(dataset):
            dataset = self._in_memory(dataset)
        length = _length(dataset, "eval_dataset")
        if self._packs_samples:
            dataset = self._packed(dataset, "eval_dataset", None)
            length = len(dataset)
        sampler = StepSampler(length, shape)
        return self._of_samples(dataset, sampler), sampler

    def _in_memory(self, dataset: SampleSource) -> list[Sample]:
        """A stream to evaluate on; it is read once."""
        if id(dataset) not in self._read:
            require_whole(dataset, "eval_dataset")
            self._read[id(dataset)] = (dataset, list(dataset))
        return self._read[id(dataset)][1]

    def _sequence_multiple(self) -> int:
        """What packed sequences are padded to multiples of."""
        size = self.ranks.layout.cp
        return 2 * size if size > 1 else 1

    def _packed(self, dataset: SampleSource, name: str, seed: int | None) -> PackedDataset:
        known = self._packs.get(id(dataset), {}).get(seed)
        if known is not None and known.dataset is dataset:
            return known
        multiple = self._sequence_multiple()
        length = self.pack_length or longest_sample(dataset, multiple)
        made = PackedDataset(dataset, length, multiple=multiple, seed=seed, name=name)
        logger.info("%s: %s", name, made.fill)
        self._packs.setdefault(id(dataset), {})[seed] = made
        return made

    def _shape(self, micro_batch_size: int, num_micro_batches: int) -> BatchShape:
        layout = self.ranks.layout
        interleaved = layout.vpp > 1
        return BatchShape(
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            data_parallel_size=self.ranks.data_parallel_size,
            data_parallel_rank=self.ranks.data_parallel_rank,
            group=self._group() if interleaved else 1,
            smallest_group=layout.pp if interleaved else 1,
        )

    def _group(self) -> int:
        """Micro-batches that the interleaved schedule hands out together."""
        size: int = self.megatron.microbatch_group_size_per_vp_stage
        return size

    def _of_samples(self, dataset: SampleSource, sampler: StepSampler) -> DataLoader[StepBatch]:
        return self._loader(CountedSamples(dataset), sampler, self._common_length(dataset, sampler.shape))

    def _loader(
        self, samples: Sample, sampler: StepSampler | StepStream, length: int | None
    ) -> DataLoader[StepBatch]:
        args = self.args
        workers = args.dataloader_num_workers
        collator = StepCollator(
            collate=self.collate,
            collator_format=self.collator_format,
            micro_batch_size=sampler.shape.micro_batch_size,
            multiple=sequence_multiple(
                self.ranks.layout,
                self.megatron.sequence_parallel,
                tokens=tokens_of_fp8(self.megatron.fp8, self.megatron.fp8_recipe),
                step=step_of_lengths(
                    self.ranks.device.type, self.megatron.transformer_impl, packed=args.sequence_packing
                ),
            ),
            context_parallel_size=self.ranks.layout.cp,
            context_parallel_rank=self.ranks.context_parallel_rank,
            pad_token_id=self.pad_token_id,
            packed=self.args.sequence_packing,
            length=length,
            images=self.images,
            positions=self.positions,
        )
        stream = isinstance(sampler, StepStream)  # its items are steps already
        return DataLoader(
            samples,
            batch_size=None if stream else 1,
            batch_sampler=None if stream else sampler,
            collate_fn=collator,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # what makes samples cannot be pickled
            # or a copy to the GPU waits for all that was launched before it
            pin_memory=args.dataloader_pin_memory and self.ranks.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # a loader draws a number whenever it starts: from here, not from the state that dropout goes on with
            generator=torch.Generator().manual_seed(args.seed),
        )


def _length(dataset: SampleSource, name: str) -> int:
    if not isinstance(dataset, Sized):
        raise McaError(f"{name} has items but no length; give it __len__, or make it an IterableDataset")
    if len(dataset) == 0:
        raise McaError(f"{name} is empty")
    return len(dataset)


def steps_of(loader: DataLoader[StepBatch]) -> Iterator[StepBatch]:
    """The steps of ``loader``; an error of a worker is the same one line as without workers."""
    try:
        yield from loader
    except McaError as error:  # torch puts the worker's traceback into its text
        kind = type(error)
        raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].rstrip()) from error


def continued(place: RunPosition, sampler: StepSampler | StepStream) -> RunPosition:
    """``place`` of a checkpoint in this run's data.

    Raises:
        McaError: Data is a stream, whose steps are counted, and they have another size now.
    """
    size, samples = sampler.shape.global_size, sampler.num_samples
    if isinstance(sampler, StepStream) and place.batch not in (0, size):
        raise UsageError(
            f"the checkpoint's steps have {counted(place.batch, 'sample')}, this run's {size}; a stream can only "
            "be resumed with steps of the same size: change gradient_accumulation_steps or per_device_train_batch_size"
        )
    if place.units not in ("", sampler.units):
        logger.warning(
            "the checkpoint counts %s, this run %s: some samples of this epoch may be used twice or not at all",
            place.units,
            sampler.units,
        )
    elif _is_inside(place, sampler) and place.order and sampler.order not in ("", place.order):
        logger.warning(
            "the checkpoint's samples come in another order (%s) than this run's (%s): some may be used twice or not "
            "at all",
            place.order,
            sampler.order,
        )
    elif isinstance(sampler, StepSampler) and place.of not in (0, samples):
        logger.warning(
            "the checkpoint is in an epoch of %s, this run's have %d: some samples of this "
            "epoch may be used twice or not at all",
            counted(place.of, "sample"),
            samples,
        )
    return replace(place.in_steps_of(size), of=samples, units=sampler.units, order=sampler.order)


def _is_inside(place: RunPosition, sampler: StepSampler | StepStream) -> bool:
    """Whether samples are to be skipped, so that it matters which ones come first."""
    at_end = place.ended or (isinstance(sampler, StepSampler) and place.samples >= place.of)
    return place.samples > 0 and not at_end
