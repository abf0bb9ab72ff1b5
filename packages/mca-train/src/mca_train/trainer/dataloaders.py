"""Trainer methods that return data loaders whose items are full steps.

``batching`` decides the content and the order of a step.
"""

import logging
from collections.abc import Iterator
from typing import cast

from torch.utils.data import DataLoader

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.training import TrainingArguments
from mca_train.batching.loaders import iterate_steps
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.position import RunLength
from mca_train.batching.sample_consistency import check_first_step
from mca_train.batching.sampling import StepSampler
from mca_train.batching.step_stream import StepStream
from mca_train.data.token_dataset import Samples
from mca_train.groups import Ranks
from mca_train.trainer.base import TrainerBase

logger = logging.getLogger(__name__)


class DataLoaderMixin(TrainerBase):
    """The Trainer's methods about data loaders, whose items are full steps."""

    def get_train_dataloader(self) -> DataLoader[StepBatch]:
        """Return this rank's training loader; an item is a step."""
        return self._train_loader()[0]

    def get_eval_dataloader(self, eval_dataset: Samples | str | None = None) -> DataLoader[StepBatch]:
        """Return this rank's evaluation loader; an item is a round of micro-batches."""
        return self._evaluation_loader(eval_dataset)

    def _evaluation_loader(self, selected: Samples | str | None) -> DataLoader[StepBatch]:
        dataset = self._eval_dataset(selected)
        self._release_other_datasets(dataset)
        return self._loaders.evaluation(dataset)[0]

    def _steps(self, loader: DataLoader[StepBatch], sampler: StepSampler | StepStream) -> Iterator[StepBatch]:
        """Iterate over the steps of an epoch; the first step of `train` is compared between ranks."""
        steps, done = self.watch.stragglers.reading(iterate_steps(loader)), self.state.global_step
        if done > self.started_at_step:
            return steps
        return check_first_step(steps, self.ranks, sampler, f"step {done + 1}")

    def _rounds(self, loader: DataLoader[StepBatch], what: str) -> Iterator[StepBatch]:
        """Iterate over an evaluation loader, compared in the same way; ``what`` names it in errors."""
        return check_first_step(
            iterate_steps(loader), self.ranks, cast("StepSampler", loader.batch_sampler), what
        )

    def _release_other_datasets(self, *datasets: Samples) -> None:
        """Release what was built for datasets that are neither the trainer's nor among these."""
        current = self.eval_dataset
        evaluated = current.values() if isinstance(current, dict) else [current]
        self._loaders.keep_only([self.train_dataset, *evaluated, *datasets])

    def _train_loader(self) -> tuple[DataLoader[StepBatch], StepSampler | StepStream]:
        if self.train_dataset is None:
            raise McaError("training needs a train_dataset (train_file)")
        self._release_other_datasets()
        return self._loaders.train(self.train_dataset)

    def _set_length(self, length: RunLength) -> None:
        self.state.compute_steps(self.args, length.max_steps)
        self.state.max_steps = length.max_steps
        self.state.num_train_epochs = length.num_epochs

    def _eval_dataset(self, selected: Samples | str | None) -> Samples:
        dataset = self.eval_dataset if selected is None else selected
        if isinstance(dataset, str):
            named = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if dataset not in named:
                raise McaError(
                    f"eval_dataset has no dataset {dataset!r}; it has: {', '.join(named) or 'no names'}"
                )
            return named[dataset]
        if dataset is None:
            raise McaError("evaluation needs an eval_dataset (eval_file)")
        return dataset


def log_plan(args: TrainingArguments, ranks: Ranks, length: RunLength, samples: int, done: int) -> None:
    """Log the plan of the run: ``samples`` per step, after ``done`` steps."""
    logger.info(
        "training %s (%d an epoch) of %s = %d micro x %d accumulated x %d data parallel; %s",
        counted(length.max_steps, "step"),
        length.steps_per_epoch,
        counted(samples, "sample"),
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        ranks.data_parallel_size,
        ranks.layout,
    )
    if done >= length.max_steps:
        logger.info("nothing to train: step %d is the end of the run already", done)
    elif done:
        logger.info("continuing after step %d", done)
