"""Training on preferences: DPO's losses over pairs of answers, against a reference model or without one.

With ``c`` and ``r`` the log-probabilities of the chosen and the rejected answer (sums over its tokens), ``c0`` and
``r0`` those of the reference, and ``m = (c - c0) - (r - r0)``:

    sigmoid   -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)     e: dpo_label_smoothing
    hinge     max(0, 1 - beta m)
    ipo       (m - 1 / (2 beta))^2, log-probabilities being means over the answer's tokens
    orpo      -c - beta log sigmoid(log odds(c) - log odds(r)), means too, no reference

The loss of a step is the mean over all pairs of the global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

LossType = Literal["sigmoid", "hinge", "ipo", "orpo"]
SIGNAL_NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""What is logged of pairs, beside the loss."""

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
        if self.beta <= 0:
            raise McaError(f"dpo_beta is {self.beta}; expected a positive number")
        if not 0 <= self.label_smoothing < 0.5:
            raise McaError(f"dpo_label_smoothing is {self.label_smoothing}; expected 0 or more and below 0.5")
        if self.label_smoothing and self.kind != "sigmoid":
            raise McaError(f"dpo_label_smoothing is for dpo_loss sigmoid, not {self.kind}; remove it")

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


def key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Keys of the arguments that are not followed for pairs."""
    if training.label_smoothing_factor:
        yield "label_smoothing_factor is not for preference pairs; use dpo_label_smoothing"


def model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """What Megatron would add to the loss of pairs, by Megatron's configuration of the model."""
    if megatron.mtp_num_layers:
        yield "preference pairs cannot train prediction layers; set mtp_num_layers to 0"
    given = megatron.moe_aux_loss_coeff
    balance = any(given) if isinstance(given, (list, tuple)) else bool(given)
    if megatron.num_moe_experts and (balance or megatron.moe_z_loss_coeff):
        yield (
            "the experts' auxiliary losses are weighed by tokens, preference pairs by pairs; set "
            "moe_aux_loss_coeff to 0 and remove moe_z_loss_coeff"
        )


def _log_odds(log_probability: Tensor) -> Tensor:
    below = log_probability.clamp(max=-1e-6)  # the odds of a certain answer have no bound
    return below - torch.log(-torch.expm1(below))


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
