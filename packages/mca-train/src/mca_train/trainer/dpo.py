"""``DpoTrainer`` trains on preference pairs, against a reference model or without one.

It runs the reference and hands its log-probabilities to the loss. The loss itself is in `losses.preference`, and pairs
are read in `data.preferences`.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_train.batching.extra_columns import ExtraColumns, RowSubset
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.step_stream import is_stream
from mca_train.checkpoint.output_dir import require_own
from mca_train.checkpoint.output_dir_guard import require_free
from mca_train.checkpoint.reference_log_probs import ReferenceFile
from mca_train.data.token_dataset import Samples
from mca_train.losses.preference import (
    SIGNAL_NAMES,
    Answers,
    PreferenceLoss,
    key_problems,
    model_problems,
    pairs_of,
    sequence_logps,
)
from mca_train.losses.token_loss import of_sequences
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import Reference, apart_from, require_reference, tell_differences
from mca_train.trainer.trainer import McaTrainer
from mca_train.types import SampleSource

if TYPE_CHECKING:
    from mca_models import VirtualModels

logger = logging.getLogger(__name__)

_SIDES = ("chosen", "rejected")
_PARTS, _STEPS = 20, 16
"""How often what is kept is written while it is computed, and after how many steps at least."""
_UNKNOWN = (
    "precompute_ref_log_probs: this dataset did not exist when the trainer was created; create another one with "
    "it as train_dataset or eval_dataset, or set precompute_ref_log_probs to false"
)


class _Stopped(Exception):
    """SIGTERM came while the reference was run; on all ranks after the same step of it."""


class DpoTrainer(McaTrainer):
    """Trains on preference pairs (`PairDataset`: ``chosen_input_ids``, ``chosen_labels``, ``rejected_...``).

    Logs ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies``, ``rewards/margins``, ``logps/chosen`` and
    ``logps/rejected`` beside the loss, in evaluation too.

    Args:
        reference: The frozen model to compare with, on the same layout. None, or what the adapter was put on: the model
            itself without its LoRA adapter, which it then must have; with ``precompute_ref_log_probs`` the model as it
            is given.
        preference: The loss.
        precompute_ref_log_probs: Log-probabilities of the reference are computed once, before training, and kept in
            ``output_dir``; then no reference is run, or held by the trainer.
        options: As of `McaTrainer`.
    """

    run_kind = "dpo"
    signal_names = SIGNAL_NAMES

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
        for problem in (*key_problems(self.args), *model_problems(self.model.megatron)):
            raise McaError(problem)
        reference = apart_from(self.model, reference, self.processing_class, kept=precompute_ref_log_probs)
        self._reference: Reference | None = None
        self._found: deque[Tensor] = deque()
        self._keeps = precompute_ref_log_probs
        if self.preference.needs_reference:
            self._reference = self._new_reference(reference)
        elif precompute_ref_log_probs:
            raise McaError(
                f"precompute_ref_log_probs: dpo_loss {self.preference.kind} has no reference; remove it"
            )
        tell_differences(self.model, without_adapter=self.preference.needs_reference and reference is None)

    def _new_reference(self, given: "VirtualModels | None") -> Reference:
        chunk = self.args.loss_chunk_size
        if given is not None:
            return Reference(given, chunk)
        from mca_models.megatron.peft import PeftModels

        adapted = isinstance(self.model, PeftModels)
        if adapted or not self._keeps:
            require_reference(self.model, self.args, f"dpo_loss {self.preference.kind}")
        return Reference(self.model, chunk, without_adapter=adapted)

    def before_training(self) -> None:
        """With ``precompute_ref_log_probs`` the reference is run, unless ranks agree to stop."""
        if (
            self._keeps
            and self._reference is None
            and not isinstance(self.train_dataset, ExtraColumns | None)
        ):
            raise McaError(_UNKNOWN)
        with contextlib.suppress(_Stopped):
            self._keep_log_probs()

    def evaluate(
        self,
        eval_dataset: Samples | dict[str, Samples] | str | None = None,
        ignore_keys: object = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """See `McaTrainer`; the same."""
        several = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        if self._keeps and not all(isinstance(each, ExtraColumns | str | None) for each in several):
            raise McaError(_UNKNOWN)  # its own values, if it has any, are no log-probabilities
        self._keep_log_probs()
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _keep_log_probs(self) -> None:
        """Those of all datasets: computed, or as an earlier part of this run has kept them."""
        reference, output_dir = self._reference, Path(self.args.output_dir)
        if reference is None or not self._keeps:
            return
        require_own(output_dir, [self.model.source])
        with self._alone(), self.watch.signal.other_steps():
            name = reference.name()

            def kept(dataset: SampleSource, part: str) -> Samples | None:
                return None if dataset is None else self._with_log_probs(reference, dataset, part, name)

            self.train_dataset = kept(self.train_dataset, "train")
            if isinstance(self.eval_dataset, dict):
                parts = self.eval_dataset.items()
                self.eval_dataset = {part: kept(dataset, f"eval_{part}") for part, dataset in parts}
            else:
                self.eval_dataset = kept(self.eval_dataset, "eval")
        self.release_first()

    def release_first(self) -> None:
        """The reference whose log-probabilities are kept."""
        if self._keeps:
            self._reference = None

    def _with_log_probs(self, reference: Reference, dataset: SampleSource, part: str, name: str) -> Samples:
        if is_stream(dataset):
            raise McaError(
                "precompute_ref_log_probs needs samples in memory, not a stream; set streaming to false"
            )
        output_dir = Path(self.args.output_dir)
        file = ReferenceFile(output_dir, part, dataset, name)
        found = run_on_first_rank_unwrapped(file.read)
        if found is None and self._claimed != output_dir.resolve():  # an evaluation without training
            require_free(output_dir, None, overwrite=self.args.overwrite_output_dir)
        known = np.full((len(dataset), 2), np.nan) if found is None else found
        missing = np.flatnonzero(np.isnan(known).any(1))
        parts = min(max(len(missing) // (_STEPS * self.args.global_eval_batch_size), 1), _PARTS)
        for rows in np.array_split(missing, parts) if len(missing) else ():
            known[rows] = self._computed(reference, dataset, rows)
            run_on_first_rank_unwrapped(lambda: file.write(known))
            if self._is_stopped:
                logger.warning(
                    "SIGTERM: what was computed of the reference is kept; the run ends before its first step"
                )
                raise _Stopped
        return ExtraColumns(dataset, known, _SIDES)

    def _computed(
        self, reference: Reference, dataset: SampleSource, rows: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        numbers = np.arange(1, 1 + 2 * len(dataset), dtype=np.float64).reshape(-1, 2)
        loader, _ = self._loaders.evaluation(RowSubset(ExtraColumns(dataset, numbers, _SIDES), rows))
        found = reference.of_samples(self._watched(loader), len(dataset), 2, self.ranks)
        log_probs: NDArray[np.float64] = found.cpu().numpy()[rows]
        return log_probs

    def _watched(self, loader: DataLoader[StepBatch]) -> Iterator[StepBatch]:
        for batch in self._rounds(loader, "the reference"):
            self.watch.pulse.now("running the reference", self.state.global_step)
            yield batch
            if self.is_in_train and self.watch.signal.agreed():
                return

    @property
    def _is_stopped(self) -> bool:
        return self.is_in_train and self.watch.stopped

    def before_forward(self, batch: StepBatch) -> None:
        """Log-probabilities of the reference for the batch."""
        if self._reference is not None and not self._keeps:
            self._found = deque(sums for sums, _ in self._reference.log_probs(batch))

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The sum over this micro-batch's pairs, and their number. Context-parallel ranks share both."""
        sums, counts = (pairs_of(values) for values in sequence_logps(output, batch))
        reference = self._of_reference(batch) if self.preference.needs_reference else None
        real = ((counts.chosen > 0) & (counts.rejected > 0)).float()
        losses = self.preference(sums, counts, reference)
        seen = self.preference.seen(sums, counts)
        self._add_signals(seen, self.preference.rewards(seen, reference), real)
        return of_sequences(losses, real, self.ranks)

    def _of_reference(self, batch: MicroBatch) -> Answers:
        if not self._keeps:
            return pairs_of(self._found.popleft())
        if batch.values is None:
            raise McaError(_UNKNOWN)
        return pairs_of(batch.values[:, -1].float())

    def _add_signals(self, policy: Answers, rewards: Answers, real: Tensor) -> None:
        margins = rewards.chosen - rewards.rejected
        values = (
            rewards.chosen,
            rewards.rejected,
            (margins > 0).float(),
            margins,
            policy.chosen,
            policy.rejected,
        )
        ranks = self.ranks.layout.cp
        sums = {
            name: (value.detach() * real).sum() / ranks
            for name, value in zip(self.signal_names, values, strict=True)
        }
        self.signals.add(sums, real.sum() / ranks)
