"""KTO: preference tuning on unpaired answers that are good or bad.

With ``r`` the log-probability of an answer minus the reference's, and ``kl`` the estimated KL divergence from the
reference, measured on answers to other prompts (a mean, at least 0):

    good answers    desirable_weight   (1 - sigmoid(beta (r - kl)))
    bad answers     undesirable_weight (1 - sigmoid(beta (kl - r)))

The loss of a step is the mean over all answers of the global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mca_train.losses import preference
from mca_train.losses.preference_options import KtoOptions

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


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


def model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """Yield an error for each field of Megatron's configuration that KTO does not support."""
    yield from preference.model_problems(megatron)
    if megatron.moe_token_dispatcher_type == "allgather":
        yield "moe_token_dispatcher_type allgather needs samples of one length, which kto does not have; use alltoall"
    if megatron.moe_pad_expert_input_to_capacity:
        yield "moe_pad_expert_input_to_capacity needs samples of one length, which kto does not have; remove it"


def divergence(gains: Tensor) -> Tensor:
    """Return the ``kl`` of a step from the summed gains of mismatched answers and their count."""
    return (gains[0] / gains[1].clamp(min=1)).clamp(min=0).float()
