"""`StepLoaders`: a trainer's data loaders, whose items are full steps.

``batching`` decides the content and the order of a step.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch.utils.data import DataLoader

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.training import TrainingArguments
from mca_train.batching.collate import CountedSamples
from mca_train.batching.loaders import Loaders, iterate_steps
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.position import RunLength
from mca_train.batching.sample_consistency import check_first_step
from mca_train.batching.sampling import StepSampler, StepStream
from mca_train.data.token_dataset import Samples
from mca_train.groups import Ranks
from mca_train.trainer.base import HfTrainer, Progress

logger = logging.getLogger(__name__)


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
