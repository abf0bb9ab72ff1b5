"""Data loaders that yield one training or evaluation step at a time."""

import logging
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from mca_config.errors import McaError, UsageError
from mca_config.printable import counted
from mca_train.batching.collate import BatchOptions, PadCollator, StepCollator
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.packing import PackedDataset, longest_sample, packing_multiple
from mca_train.batching.position import RunLength, RunPosition
from mca_train.batching.sample_consistency import check_first_step
from mca_train.batching.sampling import (
    SAMPLES,
    BatchShape,
    CountedSamples,
    PackedStream,
    StepSampler,
    StepStream,
    is_stream,
    require_steps,
    require_unsharded,
)
from mca_train.data.streams import AnswerStream
from mca_train.data.token_dataset import Samples, describe_order
from mca_train.groups import Ranks
from mca_train.trainer.base import HfTrainer, Progress
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
            rows = PackedStream(
                rows, self.pack_length, multiple=packing_multiple(self.ranks.layout.cp), make=make
            )
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

    def _pack(self, dataset: SampleSource, name: str, seed: int | None) -> PackedDataset:
        if isinstance(dataset, PackedDataset):
            return dataset
        known = self._packs.get(id(dataset), {}).get(seed)
        if known is not None and known.dataset is dataset and known.is_current():
            return known
        multiple = packing_multiple(self.ranks.layout.cp)
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
        collator = StepCollator.for_rank(
            self,
            self.ranks,
            self.megatron,
            micro_batch_size=sampler.shape.micro_batch_size,
            packed=args.sequence_packing,
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


class StepLoaders:
    """Loaders of the datasets that a trainer has at the moment.

    Args:
        hf: The trainer with the datasets.
        loaders: Builds the loaders.
        progress: Progress of the run.
    """

    def __init__(self, hf: HfTrainer, loaders: Loaders, progress: Progress) -> None:
        self._hf, self._watch, self._progress = hf, hf.watch, progress
        self._loaders = loaders

    @property
    def loaders(self) -> Loaders:
        """Return the factory of loaders, with the trainer's ``data_collator``, which may have been set since."""
        if self._loaders.collate is not self._hf.data_collator:
            self._loaders = replace(self._loaders, collate=self._hf.data_collator)
        return self._loaders

    def train(self) -> tuple[DataLoader[StepBatch], StepSampler | StepStream]:
        """Return this rank's training loader and its sampler; an item is a step."""
        if self._hf.train_dataset is None:
            raise McaError("training needs a train_dataset (train_file)")
        self._release_other_datasets()
        return self.loaders.train(self._hf.train_dataset)

    def evaluation(self, selected: Samples | str | None) -> DataLoader[StepBatch]:
        """Return this rank's evaluation loader; an item is a round of micro-batches.

        Args:
            selected: A dataset, or the name of one of the trainer's; None: the trainer's only one.
        """
        dataset = self._eval_dataset(selected)
        self._release_other_datasets(dataset)
        return self.loaders.evaluation(dataset)[0]

    def steps(self, loader: DataLoader[StepBatch], sampler: StepSampler | StepStream) -> Iterator[StepBatch]:
        """Iterate over the steps of an epoch; the first step of `train` is compared between ranks."""
        steps, done = self._watch.stragglers.reading(iterate_steps(loader)), self._hf.state.global_step
        if done > self._progress.started_at_step:
            return steps
        dataset = loader.dataset.samples if isinstance(loader.dataset, CountedSamples) else None
        return check_first_step(steps, self._hf.ranks, sampler, f"step {done + 1}", dataset)

    def rounds(self, loader: DataLoader[StepBatch], what: str) -> Iterator[StepBatch]:
        """Iterate over an evaluation loader, compared in the same way; ``what`` names it in errors."""
        return check_first_step(
            iterate_steps(loader), self._hf.ranks, cast("StepSampler", loader.batch_sampler), what
        )

    def _release_other_datasets(self, *datasets: Samples) -> None:
        """Release what was built for datasets that are neither the trainer's nor among these."""
        current = self._hf.eval_dataset
        evaluated = current.values() if isinstance(current, dict) else [current]
        self.loaders.keep_only([self._hf.train_dataset, *evaluated, *datasets])

    def _eval_dataset(self, selected: Samples | str | None) -> Samples:
        current = self._hf.eval_dataset
        dataset = current if selected is None else selected
        if isinstance(dataset, str):
            named = current if isinstance(current, dict) else {}
            if dataset not in named:
                raise McaError(
                    f"eval_dataset has no dataset {dataset!r}; it has: {', '.join(named) or 'no names'}"
                )
            return named[dataset]
        if dataset is None:
            raise McaError("evaluation needs an eval_dataset (eval_file)")
        return dataset


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
        before = counted(saved.step_samples, _unit(saved.unit or sampler.units))
        raise UsageError(
            f"the checkpoint's steps have {before}, this run's {counted(step_samples, _unit(sampler.units))}; a stream "
            "can only be resumed with steps of the same size; change gradient_accumulation_steps or "
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
        epoch = counted(saved.epoch_samples, _unit(sampler.units))
        return f"is in an epoch of {epoch}, this run's have {sampler.num_samples:,}"
    return None


def _unit(units: str) -> str:
    """Return the noun of the items that ``units`` describes."""
    return "sample" if units == SAMPLES else "pack"


def log_plan(args: TrainingArguments, ranks: Ranks, length: RunLength, samples: int, done: int) -> None:
    """Log the plan of the run: ``samples`` or packs per step, after ``done`` steps."""
    logger.info(
        "training %s (%d per epoch) of %s: micro-batch %d x accumulation %d x data parallel %d; layout %s",
        counted(length.max_steps, "step"),
        length.steps_per_epoch,
        counted(samples, "pack" if args.sequence_packing else "sample"),
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        ranks.data_parallel_size,
        ranks.layout,
    )
    if done >= length.max_steps:
        logger.info("nothing to train: step %d is the end of the run already", done)
