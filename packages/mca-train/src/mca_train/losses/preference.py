"""Training on preferences: DPO's losses over pairs of answers, against a reference model or without one.

With ``c`` and ``r`` the log-probabilities of the chosen and the rejected answer (sums over its tokens), ``c0`` and
``r0`` those of the reference, ``C = beta (c - c0)``, ``R = beta (r - r0)``, ``M = C - R`` and ``s`` the sigmoid:

    sigmoid       -(1 - e) log s(M) - e log s(-M)     e: dpo_label_smoothing
    robust        (-(1 - e) log s(M) + e log s(-M)) / (1 - 2 e)
    exo_pair      s(M) (log s(M) - log(1 - e)) + s(-M) (log s(-M) - log e)
    hinge         max(0, 1 - M)
    nca_pair      -log s(C) - log s(-C) / 2 - log s(-R) / 2
    bco_pair      -log s(C) - log s(-R)
    sppo_hard     (C - 1 / 2)^2 / beta^2 + (R + 1 / 2)^2 / beta^2
    apo_zero      s(-C) + s(R)
    apo_down      s(C) + s(-M)
    discopop      -(1 - t) log s(M) + t exp(-M)     t = s(M / 0.05)
    sigmoid_norm  -log s(M), log-probabilities being means over the answer's tokens
    ipo           (M - 1 / 2)^2 / beta^2, means too
    simpo         -log sigmoid(beta (c - r) - gamma), means too, no reference     gamma: simpo_gamma
    orpo          -c - beta log sigmoid(log odds(c) - log odds(r)), means too, no reference

``rpo_alpha`` adds that many times the chosen answer's cross entropy, a mean over its tokens.
The loss of a step is the mean over all pairs of the global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.dpo import COMPARED, Gains
from mca_train.losses.dpo_loss_types import REFUSED, LossType
from mca_train.losses.moe_aux import has_losses

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

SIGNAL_NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""What is logged of pairs, beside the loss."""

_MEANS = ("ipo", "sigmoid_norm", "simpo", "orpo")
_ALONE = ("simpo", "orpo")
_SMOOTHED = ("sigmoid", "robust", "exo_pair")
_SIMPO_GAMMA = 0.5  # as in TRL


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the chosen and the rejected answers, ``[pairs]`` each."""

    chosen: Tensor
    rejected: Tensor

    def minus(self, other: "Answers") -> "Answers":
        """Differences to those of ``other``."""
        return Answers(self.chosen - other.chosen, self.rejected - other.rejected)

    def per_token(self, tokens: "Answers") -> "Answers":
        """Means over ``tokens`` of each answer."""
        return Answers(self.chosen / tokens.chosen.clamp(min=1), self.rejected / tokens.rejected.clamp(min=1))


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """What pairs are trained on.

    Args:
        kind: See the module.
        beta: How strongly the model is kept near the reference; orpo: weight of the odds.
        label_smoothing: Share of pairs that are taken to be the wrong way round (sigmoid, robust, exo_pair).
        simpo_gamma: By how much the chosen answer shall be better (simpo).
        rpo_alpha: Weight of the chosen answer's cross entropy; None: it does not count.
    """

    kind: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float | None = None
    rpo_alpha: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in COMPARED and self.kind not in _ALONE:
            why = REFUSED.get(self.kind, f"expected {', '.join((*COMPARED, *_ALONE))}")
            raise McaError(f"dpo_loss is {self.kind!r}; {why}")
        if self.beta <= 0:
            raise McaError(f"dpo_beta is {self.beta}; expected a positive number")
        self._require_smoothing()
        if self.simpo_gamma is not None and self.kind != "simpo":
            raise McaError(f"simpo_gamma is for dpo_loss simpo, not {self.kind}; remove it")
        if self.rpo_alpha is not None and self.kind == "orpo":
            raise McaError(
                "rpo_alpha: dpo_loss orpo has the chosen answer's cross entropy already; remove it"
            )
        if self.rpo_alpha is not None and self.rpo_alpha < 0:
            raise McaError(f"rpo_alpha is {self.rpo_alpha}; expected 0 or more")

    def _require_smoothing(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise McaError(f"dpo_label_smoothing is {self.label_smoothing}; expected 0 or more and below 0.5")
        if self.label_smoothing and self.kind not in _SMOOTHED:
            raise McaError(
                f"dpo_label_smoothing is for dpo_loss {', '.join(_SMOOTHED)}, not {self.kind}; remove it"
            )
        if self.kind == "exo_pair" and not self.label_smoothing:
            raise McaError(
                "dpo_loss exo_pair needs dpo_label_smoothing above 0; set it, to 0.001 for example"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with a reference model's."""
        return self.kind not in _ALONE

    def seen(self, sums: Answers, tokens: Answers) -> Answers:
        """What is logged: sums where there is a reference, means over tokens where there is none, as in TRL."""
        return sums if self.needs_reference else sums.per_token(tokens)

    def rewards(self, policy: Answers, reference: Answers | None) -> Answers:
        """Implicit rewards, of what is `seen`."""
        found = policy if reference is None else policy.minus(reference)
        return Answers(self.beta * found.chosen, self.beta * found.rejected)

    def __call__(self, policy: Answers, tokens: Answers, reference: Answers | None = None) -> Tensor:
        """The loss of each pair.

        Args:
            policy: Log-probabilities of whole answers.
            tokens: Of each answer.
            reference: As ``policy``.
        """
        if reference is None:
            loss = self._alone(policy.per_token(tokens))
        else:
            loss = self._compared(policy.minus(reference), tokens)
        if self.rpo_alpha is not None:
            loss = loss - self.rpo_alpha * policy.per_token(tokens).chosen
        return loss

    def _alone(self, mean: Answers) -> Tensor:
        if self.kind == "orpo":
            odds = _log_odds(mean.chosen) - _log_odds(mean.rejected)
            return -mean.chosen - self.beta * logsigmoid(odds)
        if self.kind == "simpo":
            gamma = _SIMPO_GAMMA if self.simpo_gamma is None else self.simpo_gamma
            return -logsigmoid(self.beta * (mean.chosen - mean.rejected) - gamma)
        raise McaError(f"dpo_loss {self.kind} needs a reference")

    def _compared(self, gain: Answers, tokens: Answers) -> Tensor:
        if self.kind in _MEANS:
            gain = gain.per_token(tokens)
        return COMPARED[self.kind](Gains(gain.chosen, gain.rejected, self.beta, self.label_smoothing))


def key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Keys of the arguments that are not followed for pairs."""
    if training.label_smoothing_factor:
        yield "label_smoothing_factor is not for preference pairs; use dpo_label_smoothing"


def unadapted_problems(training: "TrainingArguments") -> Iterator[str]:
    """Keys that a reference excludes which is the trained model without its adapter."""
    if training.overlap_param_gather:
        yield (
            "overlap_param_gather cannot be combined with a reference that is the model without its adapter; set it "
            "to false"
        )


def reference_problems(reference: McaModelConfig, model: McaModelConfig) -> Iterator[str]:
    """What keeps a model from being the frozen one beside ``model``, by their configurations."""
    if reference.num_labels is not None:
        yield (
            f"the reference has a head for {reference.head}, not the vocabulary's, so it has no log-probabilities; "
            "name a language model"
        )
    if model.vision is not None and reference.vision is None:
        yield "the reference takes no images, as the trained model does; name one that does"


def model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """What Megatron would add to the loss of pairs, by Megatron's configuration of the model."""
    if megatron.mtp_num_layers:
        yield "preference pairs cannot train prediction layers; set mtp_num_layers to 0"
    if has_losses(megatron):
        yield (
            "the experts' auxiliary losses are weighed by tokens, preference pairs by pairs; set "
            "moe_aux_loss_coeff to 0 and remove moe_z_loss_coeff"
        )


def _log_odds(log_probability: Tensor) -> Tensor:
    below = log_probability.clamp(max=-1e-6)  # the odds of a certain answer have no bound
    return below - torch.log(-torch.expm1(below))


def sequence_logps(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets of every sequence, and their number: ``[sequences]`` over all context ranks.

    Args:
        output: ``[b, s]`` cross entropy of each token.
        batch: Whose segments are the sequences.
    """
    mask, segments = batch.loss_mask.flatten(), batch.segments.flatten()
    zeros = torch.zeros(batch.num_segments, dtype=torch.float32, device=output.device)
    sums = zeros.index_add(0, segments, -output.float().flatten() * mask)
    counts = zeros.index_add(0, segments, mask)
    return groups.sum_over_context(sums), groups.sum_over_context(counts)


def counted_sequences(batch: MicroBatch) -> Tensor:
    """Which sequences of the micro-batch have a token that counts, ``[sequences]`` bool, over all context ranks."""
    zeros = torch.zeros(batch.num_segments, dtype=torch.float32, device=batch.segments.device)
    counts = zeros.index_add(0, batch.segments.flatten(), (batch.tokens_remaining >= 0).float().flatten())
    return groups.sum_over_context(counts) > 0


def pairs_of(values: Tensor) -> Answers:
    """``values`` of the sequences of a micro-batch, which are the chosen and the rejected answer in turn.

    A pack may end in a sequence of nothing.
    """
    both = values[: len(values) // 2 * 2]
    return Answers(both[0::2], both[1::2])
