"""``DpoTrainer`` trains on preference pairs, with or without a reference model.

It runs the reference and passes its log-probabilities to the loss in `losses.preference`. `data.preferences` reads the
pairs. Precomputed log-probabilities are extra numbers of a dataset.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_models.megatron.peft import PeftModels
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import sequence_lengths
from mca_train.batching.sampling import is_stream
from mca_train.checkpoint.output_files import require_free, require_usable
from mca_train.data.token_dataset import VALUES, Samples, describe_order
from mca_train.losses.options import PAIR_METRICS
from mca_train.losses.preference import PairLogps, PreferenceLoss, sequence_logps, split_pairs
from mca_train.losses.token_loss import sequence_loss
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import (
    ReferenceLogProbs,
    ReferenceModel,
    resolve_reference,
    warn_trl_differences,
)
from mca_train.trainer.rules import RULES, pairs
from mca_train.trainer.trainer import McaTrainer
from mca_train.types import Sample, SampleSource

if TYPE_CHECKING:
    from mca_models import VirtualModels

logger = logging.getLogger(__name__)
_SIDES = ("chosen", "rejected")
_PARTS, _STEPS = 20, 16
"""Largest number of saves while computing, and least number of steps between two."""
_UNKNOWN = (
    "precompute_ref_log_probs: this dataset did not exist when the trainer was created; create a new trainer with "
    "it as train_dataset or eval_dataset, or set precompute_ref_log_probs to false"
)


class ExtraColumns(Dataset[Sample]):
    """Dataset that appends one number to the ``values`` of each sequence.

    Args:
        dataset: In-memory dataset.
        values: Numbers to append, ``[samples, sequences per sample]``.
        sides: Prefixes of the sequences of a sample; empty: a sample is one sequence.
    """

    def __init__(
        self, dataset: SampleSource, values: NDArray[np.float64 | np.int64], sides: Sequence[str] = ()
    ) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_description = describe_order(dataset)
        self._dataset, self._values = dataset, values
        self._prefixes = [f"{side}_" for side in sides] or [""]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = dict(self._dataset[index])
        for prefix, value in zip(self._prefixes, self._values[index], strict=True):
            before = [sample[prefix + VALUES]] if prefix + VALUES in sample else []
            sample[prefix + VALUES] = torch.cat([*before, torch.tensor([value], dtype=torch.float64)])
        return sample


class RowSubset(Dataset[Sample]):
    """Subset of ``dataset`` that keeps the lengths of its samples.

    Args:
        dataset: In-memory dataset.
        rows: Indices of the samples.
    """

    def __init__(self, dataset: SampleSource, rows: NDArray[np.int64]) -> None:
        self.lengths = sequence_lengths(dataset)[rows]
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[int(self._rows[index])]


class _Stopped(Exception):
    """SIGTERM during the run of the reference; raised on all ranks after the same step."""


class DpoTrainer(McaTrainer):
    """Trainer for preference pairs (`PairDataset`: ``chosen_input_ids``, ``chosen_labels``, ``rejected_...``).

    Logs ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies``, ``rewards/margins``, ``logps/chosen`` and
    ``logps/rejected`` in addition to the loss, in evaluation too.

    Args:
        reference: Frozen reference model on the same layout. None, or the adapter's base model: the model itself
            without its LoRA adapter, which it then must have; with ``precompute_ref_log_probs`` the initial model.
        preference: The loss.
        precompute_ref_log_probs: Compute the reference's log-probabilities once, before training, and save them in
            ``output_dir``. Training then runs without a reference, and the trainer drops it.
        options: Options of `McaTrainer`.
    """

    run_kind = "dpo"
    metric_names = PAIR_METRICS
    _rules = (*RULES, pairs)

    def __init__(
        self,
        *,
        reference: "VirtualModels | None" = None,
        preference: PreferenceLoss | None = None,
        precompute_ref_log_probs: bool = False,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(**options)
        self.preference = preference or PreferenceLoss()
        self._reference: ReferenceModel | None = None
        self._reference_queue: deque[Tensor] = deque()
        self._precomputes = precompute_ref_log_probs
        reference = resolve_reference(
            self.model, reference, self.processing_class, kept=precompute_ref_log_probs
        )
        needs = self.preference.needs_reference
        if precompute_ref_log_probs and not needs:
            raise McaError(
                f"precompute_ref_log_probs: dpo_loss {self.preference.kind} has no reference; remove it"
            )
        if reference is None and precompute_ref_log_probs and not isinstance(self.model, PeftModels):
            reference = self.model  # the initial one
        if needs:
            name = f"dpo_loss {self.preference.kind}"
            self._reference = ReferenceModel.for_trained(self.model, reference, self.args, name)
        warn_trl_differences(self.model, without_adapter=needs and reference is None)

    def before_training(self) -> None:
        """Run the reference with ``precompute_ref_log_probs``, until done or all ranks agree to stop."""
        if (
            self._precomputes
            and self._reference is None
            and not isinstance(self.train_dataset, ExtraColumns | None)
        ):
            raise McaError(_UNKNOWN)
        with contextlib.suppress(_Stopped):
            self._precompute_log_probs()

    def evaluate(
        self,
        eval_dataset: Samples | dict[str, Samples] | str | None = None,
        ignore_keys: object = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate like `McaTrainer`."""
        datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        if self._precomputes and not all(
            isinstance(dataset, ExtraColumns | str | None) for dataset in datasets
        ):
            raise McaError(_UNKNOWN)  # its values, if any, are not log-probabilities
        self._precompute_log_probs()
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _precompute_log_probs(self) -> None:
        """Compute the log-probabilities of all datasets, or load those saved earlier in this run."""
        reference, output_dir = self._reference, Path(self.args.output_dir)
        if reference is None or not self._precomputes:
            return
        require_usable(output_dir, [self.model.source])
        with self._output.locked():
            name = reference.name()

            self.replace_datasets(lambda dataset, part: self._with_log_probs(reference, dataset, part, name))
        self.release_first()

    def release_first(self) -> None:
        """Drop the reference if its log-probabilities are precomputed."""
        if self._precomputes:
            self._reference = None

    def _with_log_probs(
        self, reference: ReferenceModel, dataset: SampleSource, part: str, name: str
    ) -> Samples:
        if is_stream(dataset):
            raise McaError(
                "precompute_ref_log_probs needs samples in memory, not a stream; set streaming to false"
            )
        output_dir = Path(self.args.output_dir)
        file = ReferenceLogProbs(output_dir, part, dataset, name)
        saved = run_on_first_rank_unwrapped(file.read)
        if saved is None and not self._output.has_claimed:  # an evaluation without training
            require_free(output_dir, None, overwrite=self.args.overwrite_output_dir)
        known = np.full((len(dataset), 2), np.nan) if saved is None else saved
        missing = np.flatnonzero(np.isnan(known).any(1))
        parts = min(max(len(missing) // (_STEPS * self.args.global_eval_batch_size), 1), _PARTS)
        for rows in np.array_split(missing, parts) if len(missing) else ():
            known[rows] = self._compute_log_probs(reference, dataset, rows)
            run_on_first_rank_unwrapped(lambda: file.write(known))
            if self._is_stopping:
                logger.warning(
                    "SIGTERM: the reference's log-probabilities so far are saved; the run ends before its first step"
                )
                raise _Stopped
        return ExtraColumns(dataset, known, _SIDES)

    def _compute_log_probs(
        self, reference: ReferenceModel, dataset: SampleSource, rows: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        numbers = np.arange(1, 1 + 2 * len(dataset)).reshape(-1, 2)
        loader, _ = self._data.loaders.evaluation(RowSubset(ExtraColumns(dataset, numbers, _SIDES), rows))
        values = reference.dataset_log_probs(self._report_progress(loader), len(dataset), 2, self.ranks)
        log_probs: NDArray[np.float64] = values.cpu().numpy()[rows]
        return log_probs

    def _report_progress(self, loader: DataLoader[StepBatch]) -> Iterator[StepBatch]:
        for batch in self._data.rounds(loader, "the reference"):
            self.watch.hang_detector.enter("running the reference", self.state.global_step)
            yield batch
            if self.is_in_train and self.watch.signal.agreed():
                return

    @property
    def _is_stopping(self) -> bool:
        return self.is_in_train and self.watch.stopped

    def before_forward(self, batch: StepBatch) -> None:
        """Compute the reference's log-probabilities of the batch."""
        if self._reference is not None and not self._precomputes:
            self._reference_queue = deque(sums for sums, _ in self._reference.log_probs(batch))

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss sum over this micro-batch's pairs and their count, which context-parallel ranks share."""
        sums, counts = (split_pairs(values) for values in sequence_logps(output, batch))
        reference = self._reference_logps(batch) if self.preference.needs_reference else None
        real = ((counts.chosen > 0) & (counts.rejected > 0)).float()
        losses = self.preference(sums, counts, reference)
        logged = self.preference.logged_logps(sums, counts)
        self._add_metrics(logged, self.preference.rewards(logged, reference), real)
        return sequence_loss(losses, real, self.ranks)

    def _reference_logps(self, batch: MicroBatch) -> PairLogps:
        if not self._precomputes:
            return split_pairs(self._reference_queue.popleft())
        if batch.values is None:
            raise McaError(_UNKNOWN)
        return split_pairs(batch.values[:, -1].float())

    def _add_metrics(self, policy: PairLogps, rewards: PairLogps, real: Tensor) -> None:
        margins = rewards.chosen - rewards.rejected
        values = (
            rewards.chosen,
            rewards.rejected,
            (margins > 0).float(),
            margins,
            policy.chosen,
            policy.rejected,
        )
        self._add_means(dict(zip(self.metric_names, values, strict=True)), real)
