"""Training on preferences: DPO's losses over pairs of answers, against a reference model or without one.

With ``c`` and ``r`` the log-probabilities of the chosen and the rejected answer (sums over its tokens), ``c0`` and
``r0`` those of the reference, and ``m = (c - c0) - (r - r0)``:

    sigmoid   -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)     e: dpo_label_smoothing
    hinge     max(0, 1 - beta m)
    ipo       (m - 1 / (2 beta))^2, log-probabilities being means over the answer's tokens
    orpo      -c - beta log sigmoid(log odds(c) - log odds(r)), means too, no reference

The loss of a step is the mean over all pairs of the global batch.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mca_config.errors import McaError
from mca_train import groups
from mca_train.arguments import require_preference
from mca_train.batches import MicroBatch, StepBatch
from mca_train.chunked_loss import chunk_losses
from mca_train.engine import Pipeline
from mca_train.trainer import McaTrainer

logger = logging.getLogger(__name__)

LossType = Literal["sigmoid", "hinge", "ipo", "orpo"]
_MEANS = ("ipo", "orpo")


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the chosen and the rejected answers, ``[pairs]`` each."""

    chosen: Tensor
    rejected: Tensor

    def minus(self, other: "Answers") -> "Answers":
        """Differences to those of ``other``."""
        return Answers(self.chosen - other.chosen, self.rejected - other.rejected)


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """What pairs are trained on.

    Args:
        kind: See the module.
        beta: How strongly answers are held to the reference; orpo: weight of the odds.
        label_smoothing: Share of pairs that are taken to be the wrong way round (sigmoid).
    """

    kind: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_preference(self.kind, self.beta, self.label_smoothing)

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with a reference model's."""
        return self.kind != "orpo"

    @property
    def of_means(self) -> bool:
        """Whether log-probabilities are means over an answer's tokens instead of sums."""
        return self.kind in _MEANS

    def rewards(self, policy: Answers, reference: Answers | None) -> Answers:
        """Implicit rewards."""
        found = policy if reference is None else policy.minus(reference)
        return Answers(self.beta * found.chosen, self.beta * found.rejected)

    def __call__(self, policy: Answers, reference: Answers | None = None) -> Tensor:
        """The loss of each pair."""
        if self.kind == "orpo":
            odds = _log_odds(policy.chosen) - _log_odds(policy.rejected)
            return -policy.chosen - self.beta * logsigmoid(odds)
        if reference is None:
            raise McaError(f"dpo_loss {self.kind} needs a reference")
        gain = policy.minus(reference)
        margin = gain.chosen - gain.rejected
        if self.kind == "hinge":
            return torch.relu(1 - self.beta * margin)
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        smoothing = self.label_smoothing
        scaled = self.beta * margin
        return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)


def _log_odds(log_probability: Tensor) -> Tensor:
    below = log_probability.clamp(max=-1e-6)  # the odds of a certain answer have no bound
    return below - torch.log(-torch.expm1(below))


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

    signal_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(
        self, *, reference: Any = None, preference: PreferenceLoss | None = None, **options: Any
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
            self._reference_pipeline = Pipeline(chunks, self._keep_reference)

    def _check(self, reference: Any) -> None:
        megatron, args = self.model.megatron, self.args
        if args.label_smoothing_factor:
            raise McaError("label_smoothing_factor is not for preference pairs; use dpo_label_smoothing")
        if megatron.mtp_num_layers:
            raise McaError("preference pairs cannot train prediction layers; set mtp_num_layers to 0")
        if self.model.config.num_moe_experts and _has_auxiliary_loss(megatron):
            raise McaError(
                "the experts' auxiliary losses are weighed by tokens, preference pairs by pairs; set "
                "moe_aux_loss_coeff to 0 and remove moe_z_loss_coeff"
            )
        if reference is not None or not self.preference.needs_reference:
            return
        adapter = getattr(self.model, "adapter", None)
        if adapter is None:
            raise McaError(
                f"dpo_loss {self.preference.kind} compares with a reference: give one, or a model with a LoRA adapter"
            )
        if adapter.modules_to_save:
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
        with self.model.disable_adapter():
            yield

    def _keep_reference(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        sums, counts = answer_logps(output, batch)
        self._reference.append(sums)
        return sums.sum(), counts.sum()

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: Any) -> tuple[Tensor, Tensor]:
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


def answer_logps(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of every answer of the micro-batch, and its tokens: ``[2 * pairs]`` over all context ranks.

    Args:
        output: ``[b, s]`` cross entropy of each token.
        batch: Whose segments are the chosen and the rejected answer of each pair, in turn.
    """
    mask, segments = batch.loss_mask.flatten(), batch.segments.flatten()
    zeros = torch.zeros(batch.num_segments, dtype=torch.float32, device=output.device)
    sums = zeros.index_add(0, segments, -output.float().flatten() * mask)
    counts = zeros.index_add(0, segments, mask)
    pairs = batch.num_segments // 2  # a pack may end in a sequence of nothing
    return groups.sum_over_context(sums)[: 2 * pairs], groups.sum_over_context(counts)[: 2 * pairs]


def _has_auxiliary_loss(megatron: Any) -> bool:
    coefficients = megatron.moe_aux_loss_coeff
    several = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients]
    return any(several) or bool(megatron.moe_z_loss_coeff)
