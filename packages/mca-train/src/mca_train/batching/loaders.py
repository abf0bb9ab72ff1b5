"""Data loaders that yield one training or evaluation step at a time."""

import logging
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.utils.data import DataLoader

from mca_config.checks import fp8_token_multiple, length_multiple, sequence_multiple
from mca_config.errors import McaError, UsageError
from mca_config.printable import counted
from mca_train.batching.collate import BatchOptions, CountedSamples, PadCollator, StepCollator
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.packing import PackedDataset, longest_sample
from mca_train.batching.position import RunPosition
from mca_train.batching.sampling import (
    SAMPLES,
    BatchShape,
    PackedStream,
    StepSampler,
    StepStream,
    is_stream,
    require_steps,
    require_unsharded,
)
from mca_train.data.streams import AnswerStream
from mca_train.data.token_dataset import describe_order
from mca_train.groups import Ranks
from mca_train.types import Sample, SampleSource, TrainingArguments, Upstream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaders(BatchOptions):
    """Factory of the training and evaluation loaders of this rank.

    Args:
        args: Training arguments.
        ranks: Position of this rank in the layout.
        megatron: Megatron's ``TransformerConfig`` of the model.
        pack_length: Tokens per pack with ``sequence_packing``; None: the length of the longest sample.
    """

    args: TrainingArguments
    ranks: Ranks
    megatron: Upstream
    pack_length: int | None = None
    _packs: dict[int, dict[int | None, PackedDataset]] = field(default_factory=dict)
    _evaluation_samples: dict[int, tuple[Sample, list[Sample]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.args.sequence_packing and not isinstance(self.collate, PadCollator):
            raise McaError(
                "sequence_packing is not supported with data_collator; give samples their labels and "
                "remove data_collator, or set sequence_packing to false"
            )

    def keep_only(self, datasets: Iterable[object]) -> None:
        """Drop cached packs and evaluation samples of all other datasets."""
        kept = {id(dataset) for dataset in datasets}
        for made in (self._packs, self._evaluation_samples):
            for key in made.keys() - kept:
                del made[key]

    def train(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepSampler | StepStream]:
        """Return the training loader and its sampler, which selects the epoch and the first sample."""
        args = self.args
        if is_stream(dataset):
            return self._stream_loader(dataset)
        length, units = _length(dataset, "train_dataset"), SAMPLES
        is_random = str(args.train_sampling_strategy) == "random"
        seed = (args.seed if args.data_seed is None else args.data_seed) if is_random else None
        drawn = "not shuffled" if seed is None else f"shuffled by seed {seed}"
        order = ", ".join(filter(None, (describe_order(dataset), drawn)))
        if args.sequence_packing:
            dataset = self._pack(dataset, "train_dataset", seed)
            length, units = len(dataset), dataset.units
        sampler = StepSampler(
            length,
            self._shape(args.per_device_train_batch_size, args.gradient_accumulation_steps),
            seed=seed,
            drop_last=args.dataloader_drop_last,
            units=units,
            order=order,
        )
        return self._sample_loader(dataset, sampler), sampler

    def _stream_loader(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepStream]:
        args = self.args
        require_steps(dataset, args.max_steps)
        require_unsharded(dataset, "train_dataset")
        if found := self._fixed_length_option():
            raise McaError(
                f"{found[0]} needs equally long samples on all ranks, which a stream does not guarantee; set it to "
                f"{found[1]}"
            )
        shape = self._shape(args.per_device_train_batch_size, args.gradient_accumulation_steps)
        rows, make = (dataset.rows, dataset.make) if isinstance(dataset, AnswerStream) else (dataset, None)
        units = SAMPLES
        if args.sequence_packing:
            if self.pack_length is None:
                raise McaError(
                    "sequence_packing of a stream needs pack_length, because its longest sample is not known; set "
                    "pack_length"
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
            order=describe_order(dataset),
        )
        return self._loader(stream, stream, None), stream

    def _common_length(self, dataset: SampleSource, shape: BatchShape) -> int | None:
        """Return the padded length of all rows, if experts need the same number of tokens from all ranks."""
        if not self._fixed_length_option():
            return None
        packed = isinstance(dataset, PackedDataset)  # all packs of a micro-batch form one row
        return shape.micro_batch_size * dataset.fill.length if packed else longest_sample(dataset)

    def _fixed_length_option(self) -> tuple[str, str] | None:
        """Return the option that needs equally long rows on all replicas, and the value that does not."""
        layout = self.ranks.layout
        if layout.ep == 1 and layout.etp <= layout.tp:
            return None
        if self.megatron.moe_token_dispatcher_type == "allgather":
            return "moe_token_dispatcher_type allgather", "alltoall"
        filled = self.megatron.moe_pad_expert_input_to_capacity
        return ("moe_pad_expert_input_to_capacity", "false") if filled else None

    def evaluation(self, dataset: SampleSource) -> tuple[DataLoader[StepBatch], StepSampler]:
        """Return the evaluation loader: each round fills the pipeline, and each sample comes once, in order."""
        pipeline = self.ranks.layout.pp
        shape = self._shape(self.args.per_device_eval_batch_size, pipeline)
        if is_stream(dataset):
            dataset = self._load_stream(dataset)
        length = _length(dataset, "eval_dataset")
        if self.args.sequence_packing:
            dataset = self._pack(dataset, "eval_dataset", None)
            length = len(dataset)
        sampler = StepSampler(length, shape)
        return self._sample_loader(dataset, sampler), sampler

    def _load_stream(self, dataset: SampleSource) -> list[Sample]:
        """Return the samples of an evaluation stream, which is read once."""
        if id(dataset) not in self._evaluation_samples:
            require_unsharded(dataset, "eval_dataset")
            self._evaluation_samples[id(dataset)] = (dataset, list(dataset))
        return self._evaluation_samples[id(dataset)][1]

    def _sequence_multiple(self) -> int:
        """Return the multiple that packed sequences are padded to."""
        size = self.ranks.layout.cp
        return 2 * size if size > 1 else 1

    def _pack(self, dataset: SampleSource, name: str, seed: int | None) -> PackedDataset:
        if isinstance(dataset, PackedDataset):
            return dataset
        known = self._packs.get(id(dataset), {}).get(seed)
        if known is not None and known.dataset is dataset and known.is_current():
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
            group=self.megatron.microbatch_group_size_per_vp_stage if interleaved else 1,
            smallest_group=layout.pp if interleaved else 1,
        )

    def _sample_loader(self, dataset: SampleSource, sampler: StepSampler) -> DataLoader[StepBatch]:
        return self._loader(CountedSamples(dataset), sampler, self._common_length(dataset, sampler.shape))

    def _loader(
        self, samples: Sample, sampler: StepSampler | StepStream, length: int | None
    ) -> DataLoader[StepBatch]:
        args = self.args
        workers = args.dataloader_num_workers
        collator = StepCollator(
            **self.batch_options,
            micro_batch_size=sampler.shape.micro_batch_size,
            multiple=sequence_multiple(
                self.ranks.layout,
                self.megatron.sequence_parallel,
                tokens=fp8_token_multiple(self.megatron.fp8, self.megatron.fp8_recipe),
                step=length_multiple(
                    self.ranks.device.type, self.megatron.transformer_impl, packed=args.sequence_packing
                ),
            ),
            context_parallel_size=self.ranks.layout.cp,
            context_parallel_rank=self.ranks.context_parallel_rank,
            packed=self.args.sequence_packing,
            length=length,
        )
        stream = isinstance(sampler, StepStream)  # yields whole steps
        loader = DataLoader(
            samples,
            batch_size=None if stream else 1,
            batch_sampler=None if stream else sampler,
            collate_fn=collator,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # datasets may not be picklable
            # without pinned memory a copy to the GPU waits for all kernels launched before it
            pin_memory=args.dataloader_pin_memory and self.ranks.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # the loader draws a seed at each start; a separate generator keeps the global state, which dropout uses,
            # unchanged
            generator=torch.Generator(),
        )
        self.seed_workers(loader)
        return loader

    def seed_workers(self, loader: DataLoader[StepBatch], *position: int) -> None:
        """Seed the workers of ``loader``: differently on each replica, and in each epoch and at each first sample."""
        entropy = (self.args.seed % 2**32, self.ranks.data_parallel_rank, *position)
        loader.generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _length(dataset: SampleSource, name: str) -> int:
    if not isinstance(dataset, Sized):
        raise McaError(f"{name} has items but no length; give it __len__, or make it an IterableDataset")
    if len(dataset) == 0:
        raise McaError(f"{name} is empty")
    return len(dataset)


def iterate_steps(loader: DataLoader[StepBatch]) -> Iterator[StepBatch]:
    """Yield the steps of ``loader``; an error in a worker process raises the same one-line error as without workers."""
    try:
        yield from loader
    except McaError as error:  # torch adds the worker's traceback to the message
        kind = type(error)
        raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].rstrip()) from error


def resume_position(saved: RunPosition, sampler: StepSampler | StepStream) -> RunPosition:
    """Return the position ``saved`` by a checkpoint, converted to the batch size and the data of this run.

    Raises:
        McaError: The dataset is a stream and the number of samples per step has changed.
    """
    step_samples, epoch_samples = sampler.shape.global_size, sampler.num_samples
    if isinstance(sampler, StepStream) and saved.step_samples not in (0, step_samples):
        raise UsageError(
            f"the checkpoint's steps have {counted(saved.step_samples, _unit(sampler))}, this run's {step_samples}; a "
            "stream can only be resumed with steps of the same size; change gradient_accumulation_steps or "
            "per_device_train_batch_size"
        )
    if difference := _data_difference(saved, sampler):
        logger.warning(
            "the checkpoint %s: some samples of this epoch may be used twice or not at all", difference
        )
    return replace(
        saved.with_step_samples(step_samples),
        epoch_samples=epoch_samples,
        unit=sampler.units,
        order=sampler.order,
    )


def _data_difference(saved: RunPosition, sampler: StepSampler | StepStream) -> str | None:
    """Return how the samples differ from those of the checkpoint; None: they are the same, or none is skipped."""
    in_memory = isinstance(sampler, StepSampler)
    if saved.unit not in ("", sampler.units):
        return f"counts {saved.unit}, this run {sampler.units}"
    epoch_is_over = saved.epoch_ended or (in_memory and saved.samples >= saved.epoch_samples)
    skips_samples = saved.samples > 0 and not epoch_is_over
    if skips_samples and saved.order and sampler.order not in ("", saved.order):
        return f"has its samples in another order ({saved.order}) than this run ({sampler.order})"
    if in_memory and saved.epoch_samples not in (0, sampler.num_samples):
        epoch = counted(saved.epoch_samples, _unit(sampler))
        return f"is in an epoch of {epoch}, this run's have {sampler.num_samples:,}"
    return None


def _unit(sampler: StepSampler | StepStream) -> str:
    """Return the noun of a sampler's items."""
    return "sample" if sampler.units == SAMPLES else "pack"
