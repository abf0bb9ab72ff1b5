"""Preference tuning: DPO losses over pairs of answers, with or without a reference model, and KTO over single answers.

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

``rpo_alpha`` is the weight of the chosen answer's cross entropy (a mean over its tokens), added to the loss.
The loss of a step is the mean over all pairs, or single answers, of the global batch.

KTO takes unpaired answers that are good or bad. With ``r`` the log-probability of an answer minus the reference's, and
``kl`` the estimated KL divergence from the reference, measured on answers to other prompts (a mean, at least 0):

    good answers    desirable_weight   (1 - sigmoid(beta (r - kl)))
    bad answers     undesirable_weight (1 - sigmoid(beta (kl - r)))
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import log, log1p
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.moe_aux import has_losses
from mca_train.losses.options import LossType
from mca_train.losses.preference_options import KtoOptions, PreferenceOptions

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_TAU = 0.05  # as in the paper


@dataclass(frozen=True)
class LogRatios:
    """Log-probabilities of answers minus those of the reference.

    Args:
        chosen: ``[pairs]``, of the chosen answers.
        rejected: ``[pairs]``, of the rejected answers.
        beta: Strength of the KL penalty.
        smoothing: Assumed fraction of pairs in the wrong order.
    """

    chosen: Tensor
    rejected: Tensor
    beta: float
    smoothing: float

    @property
    def chosen_reward(self) -> Tensor:
        """Return the rewards of the chosen answers."""
        return self.beta * self.chosen

    @property
    def rejected_reward(self) -> Tensor:
        """Return the rewards of the rejected answers."""
        return self.beta * self.rejected

    @property
    def margin(self) -> Tensor:
        """Return the reward margins."""
        return self.beta * (self.chosen - self.rejected)


def _sigmoid(x: LogRatios) -> Tensor:
    return -(1 - x.smoothing) * logsigmoid(x.margin) - x.smoothing * logsigmoid(-x.margin)


def _robust(x: LogRatios) -> Tensor:
    right = -(1 - x.smoothing) * logsigmoid(x.margin) + x.smoothing * logsigmoid(-x.margin)
    return right / (1 - 2 * x.smoothing)


def _exo_pair(x: LogRatios) -> Tensor:
    right, wrong = logsigmoid(x.margin), logsigmoid(-x.margin)
    right_ratio, wrong_ratio = right - log1p(-x.smoothing), wrong - log(x.smoothing)
    return right.exp() * right_ratio + wrong.exp() * wrong_ratio


def _discopop(x: LogRatios) -> Tensor:
    share = torch.sigmoid(x.margin / _TAU)
    # share / exp(m), written so that a large -m does not overflow
    power = torch.exp(logsigmoid(x.margin / _TAU) - x.margin)
    return -logsigmoid(x.margin) * (1 - share) + power


REFERENCE_LOSSES: Mapping[LossType, Callable[[LogRatios], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": lambda x: relu(1 - x.margin),
    "ipo": lambda x: (x.chosen - x.rejected - 1 / (2 * x.beta)) ** 2,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": lambda x: (
        -logsigmoid(x.chosen_reward) - (logsigmoid(-x.chosen_reward) + logsigmoid(-x.rejected_reward)) / 2
    ),
    "bco_pair": lambda x: -logsigmoid(x.chosen_reward) - logsigmoid(-x.rejected_reward),
    "sppo_hard": lambda x: (x.chosen - 0.5 / x.beta) ** 2 + (x.rejected + 0.5 / x.beta) ** 2,
    "apo_zero": lambda x: torch.sigmoid(-x.chosen_reward) + torch.sigmoid(x.rejected_reward),
    "apo_down": lambda x: torch.sigmoid(x.chosen_reward) + torch.sigmoid(-x.margin),
    "discopop": _discopop,
}
"""Loss of each pair, by ``dpo_loss``."""


_LENGTH_NORMALIZED = ("ipo", "sigmoid_norm", "simpo", "orpo")
_SIMPO_GAMMA = 0.5  # as in TRL


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of the chosen and the rejected answers, ``[pairs]`` each."""

    chosen: Tensor
    rejected: Tensor

    def minus(self, other: "PairLogps") -> "PairLogps":
        """Return the differences to ``other``."""
        return PairLogps(self.chosen - other.chosen, self.rejected - other.rejected)

    def per_token(self, tokens: "PairLogps") -> "PairLogps":
        """Return means over the ``tokens`` of each answer."""
        return PairLogps(
            self.chosen / tokens.chosen.clamp(min=1), self.rejected / tokens.rejected.clamp(min=1)
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(PreferenceOptions):
    """Loss of preference pairs."""

    def logged_logps(self, sums: PairLogps, tokens: PairLogps) -> PairLogps:
        """Return the logged log-probabilities: sums with a reference, token means without one, as in TRL."""
        return sums if self.needs_reference else sums.per_token(tokens)

    def rewards(self, policy: PairLogps, reference: PairLogps | None) -> PairLogps:
        """Return implicit rewards of the log-probabilities that `logged_logps` returned."""
        gain = policy if reference is None else policy.minus(reference)
        return PairLogps(self.beta * gain.chosen, self.beta * gain.rejected)

    def __call__(self, policy: PairLogps, tokens: PairLogps, reference: PairLogps | None = None) -> Tensor:
        """Return the loss of each pair.

        Args:
            policy: Log-probabilities of full answers.
            tokens: Token counts of the answers.
            reference: Log-probabilities of the reference.
        """
        if reference is None:
            loss = self._reference_free_loss(policy.per_token(tokens))
        else:
            loss = self._reference_loss(policy.minus(reference), tokens)
        if self.rpo_alpha is not None:
            loss = loss - self.rpo_alpha * policy.per_token(tokens).chosen
        return loss

    def _reference_free_loss(self, mean: PairLogps) -> Tensor:
        if self.kind == "orpo":
            odds = _log_odds(mean.chosen) - _log_odds(mean.rejected)
            return -mean.chosen - self.beta * logsigmoid(odds)
        if self.kind == "simpo":
            gamma = _SIMPO_GAMMA if self.simpo_gamma is None else self.simpo_gamma
            return -logsigmoid(self.beta * (mean.chosen - mean.rejected) - gamma)
        raise McaError(f"dpo_loss {self.kind} needs a reference")

    def _reference_loss(self, gain: PairLogps, tokens: PairLogps) -> Tensor:
        if self.kind in _LENGTH_NORMALIZED:
            gain = gain.per_token(tokens)
        return REFERENCE_LOSSES[self.kind](
            LogRatios(gain.chosen, gain.rejected, self.beta, self.label_smoothing)
        )


def reference_problems(reference: McaModelConfig, model: McaModelConfig) -> Iterator[str]:
    """Yield an error if ``reference`` cannot be the reference of ``model``, from their configurations."""
    if reference.head.num_labels is not None:
        yield (
            f"the reference has a {reference.head.head_kind} head and no log-probabilities of tokens; "
            "set a language model"
        )
    if model.vision is not None and reference.vision is None:
        yield "the reference takes no images, but the trained model does; set one that takes images"


def model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """Yield an error for each field of Megatron's configuration that preference pairs do not support."""
    if megatron.mtp_num_layers:
        yield "MTP layers are not supported with preference pairs; set mtp_num_layers to 0"
    if has_losses(megatron):
        yield (
            "MoE auxiliary losses are weighted by tokens, preference losses by pairs; set "
            "moe_aux_loss_coeff to 0 and remove moe_z_loss_coeff"
        )


def _log_odds(log_probability: Tensor) -> Tensor:
    bounded = log_probability.clamp(max=-1e-6)  # the odds are infinite at probability 1
    return bounded - torch.log(-torch.expm1(bounded))


def sequence_logps(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return log-probability and target count of every sequence, ``[sequences]``, over all context ranks.

    Args:
        output: ``[b, s]`` cross entropy of each token.
        batch: Micro-batch with segment ids.
    """
    mask, segments = batch.loss_mask.flatten(), batch.segments.flatten()
    zeros = torch.zeros(batch.num_segments, dtype=torch.float32, device=output.device)
    sums = zeros.index_add(0, segments, -output.float().flatten() * mask)
    counts = zeros.index_add(0, segments, mask)
    return groups.sum_over_context(sums), groups.sum_over_context(counts)


def counted_sequences(batch: MicroBatch) -> Tensor:
    """Return which sequences of the micro-batch have a target, ``[sequences]`` bool, over all context ranks."""
    zeros = torch.zeros(batch.num_segments, dtype=torch.float32, device=batch.segments.device)
    counts = zeros.index_add(0, batch.segments.flatten(), (batch.tokens_remaining >= 0).float().flatten())
    return groups.sum_over_context(counts) > 0


def split_pairs(values: Tensor) -> PairLogps:
    """Split ``values`` of a micro-batch's sequences, alternating chosen and rejected answers.

    A pack may end in an empty sequence.
    """
    both = values[: len(values) // 2 * 2]
    return PairLogps(both[0::2], both[1::2])


@dataclass(frozen=True, kw_only=True)
class KtoLoss(KtoOptions):
    """KTO loss."""

    def __call__(self, gain: Tensor, good: Tensor, kl: Tensor) -> Tensor:
        """Return the loss of each answer.

        Args:
            gain: Log-probability of each answer minus the reference's.
            good: True for good answers.
            kl: Estimate of the step.
        """
        shifted = self.beta * (gain - kl)
        desirable = self.desirable_weight * (1 - torch.sigmoid(shifted))
        return torch.where(good, desirable, self.undesirable_weight * (1 - torch.sigmoid(-shifted)))


def kto_model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """Yield an error for each field of Megatron's configuration that KTO does not support."""
    yield from model_problems(megatron)
    if megatron.moe_token_dispatcher_type == "allgather":
        yield "moe_token_dispatcher_type allgather needs samples of one length, which kto does not have; use alltoall"
    if megatron.moe_pad_expert_input_to_capacity:
        yield "moe_pad_expert_input_to_capacity needs samples of one length, which kto does not have; remove it"


def divergence(gains: Tensor) -> Tensor:
    """Return the ``kl`` of a step from the summed gains of mismatched answers and their count."""
    return (gains[0] / gains[1].clamp(min=1)).clamp(min=0).float()
