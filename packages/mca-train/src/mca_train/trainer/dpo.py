"""``DpoTrainer`` trains on preference pairs, against a reference model or without one.

It runs the reference and hands its log-probabilities to the loss. The loss itself is in `losses.preference`, and pairs
are read in `data.preferences`.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack, cast

from torch import Tensor

from mca_config.errors import McaError
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.pipeline import Pipeline
from mca_train.losses.chunked import chunk_losses
from mca_train.losses.preference import (
    SIGNAL_NAMES,
    Answers,
    PreferenceLoss,
    answer_logps,
    key_problems,
    model_problems,
)
from mca_train.trainer.parts import TrainerOptions
from mca_train.trainer.trainer import McaTrainer

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.peft import PeftModels


class DpoTrainer(McaTrainer):
    """Trains on preference pairs (`PairDataset`: ``chosen_input_ids``, ``chosen_labels``, ``rejected_...``).

    Logs ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies``, ``rewards/margins``, ``logps/chosen`` and
    ``logps/rejected`` beside the loss, in evaluation too.

    Args:
        reference: The frozen model to compare with, on the same layout. None: the model itself without its
            LoRA adapter, which it then must have.
        preference: The loss.
        options: As of `McaTrainer`.
    """

    signal_names = SIGNAL_NAMES

    def __init__(
        self,
        *,
        reference: "VirtualModels | None" = None,
        preference: PreferenceLoss | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(**options)
        self.preference = preference or PreferenceLoss()
        self._check(reference)
        self._reference_model = reference
        self._reference: deque[Tensor] = deque()
        self._reference_pipeline: Pipeline | None = None
        if self.preference.needs_reference:
            chunks = (reference or self.model).chunks
            chunk_losses(chunks, self.args.loss_chunk_size, wants_logits=False)
            self._reference_pipeline = Pipeline(list(chunks), self._keep_reference)

    def _check(self, reference: "VirtualModels | None") -> None:
        args = self.args
        for problem in (*key_problems(args), *model_problems(self.model.megatron)):
            raise McaError(problem)
        if reference is not None or not self.preference.needs_reference:
            return
        from mca_models.megatron.peft import PeftModels

        if not isinstance(self.model, PeftModels):
            raise McaError(
                f"dpo_loss {self.preference.kind} compares with a reference: give one, or a model with a LoRA adapter"
            )
        if self.model.adapter.modules_to_save:
            raise McaError(
                "modules_to_save trains parts of the base model, which then is no reference; give a reference "
                "model, or leave modules_to_save out"
            )
        if args.overlap_param_gather:
            raise McaError(
                "overlap_param_gather does not go with a reference that is the model without its adapter; set it "
                "to false"
            )

    def before_forward(self, batch: StepBatch) -> None:
        """Log-probabilities of the reference for the batch."""
        self._reference.clear()
        pipeline = self._reference_pipeline
        if pipeline is None:
            return
        with pipeline.at_rest(), self._without_adapter():
            pipeline.evaluate(batch)

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        if self._reference_model is not None:
            yield
            return
        with cast("PeftModels", self.model).disable_adapter():
            yield

    def _keep_reference(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        sums, counts = answer_logps(output, batch)
        self._reference.append(sums)
        return sums.sum(), counts.sum()

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The sum over this micro-batch's pairs, and their number. Context-parallel ranks share both."""
        sums, counts = answer_logps(output, batch)
        policy = self._answers(sums, counts)
        reference = None
        if self.preference.needs_reference:
            reference = self._answers(self._reference.popleft(), counts)
        real = ((counts[0::2] > 0) & (counts[1::2] > 0)).float()
        total = (self.preference(policy, reference) * real).sum()
        self._add_signals(policy, self.preference.rewards(policy, reference), real)
        ranks, first = self.ranks.layout.cp, self.ranks.context_parallel_rank == 0
        # every context rank has the whole loss, and the gradient of its own tokens
        shared = total + (total / ranks - total).detach()
        return shared, real.sum().int() * int(first)

    def _answers(self, sums: Tensor, counts: Tensor) -> Answers:
        values = sums / counts.clamp(min=1) if self.preference.of_means else sums
        return Answers(values[0::2], values[1::2])

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
