"""Training on answers that are good or bad, each alone: KTO.

With ``r`` the log-probability of an answer minus the reference's, and ``kl`` how far the model has moved from the
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

from mca_config.errors import McaError
from mca_train.losses import preference

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class KtoLoss:
    """What answers are trained on.

    Args:
        beta: How strongly the model is kept near the reference.
        desirable_weight: Of good answers.
        undesirable_weight: Of bad ones.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise McaError(f"kto_beta is {self.beta}; expected a positive number")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise McaError(f"{name} is {getattr(self, name)}; expected 0 or more")

    def __call__(self, gain: Tensor, good: Tensor, kl: Tensor) -> Tensor:
        """The loss of each answer.

        Args:
            gain: Its log-probability minus the reference's.
            good: Whether it is.
            kl: Of the step.
        """
        away = self.beta * (gain - kl)
        liked = self.desirable_weight * (1 - torch.sigmoid(away))
        return torch.where(good, liked, self.undesirable_weight * (1 - torch.sigmoid(-away)))


def key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Keys of the arguments that are not followed for such answers."""
    yield from preference.key_problems(training)
    if training.overlap_param_gather:
        yield (
            "overlap_param_gather cannot be combined with kto, which runs the model before a step; set it to false"
        )


def model_problems(megatron: "TransformerConfig") -> Iterator[str]:
    """What Megatron would add to the loss of such answers, or not do with them, by its configuration of the model."""
    yield from preference.model_problems(megatron)
    if megatron.moe_token_dispatcher_type == "allgather":
        yield "moe_token_dispatcher_type allgather needs samples of one length, which kto does not have; use alltoall"
    if megatron.moe_pad_expert_input_to_capacity:
        yield "moe_pad_expert_input_to_capacity needs samples of one length, which kto does not have; remove it"


def step_problems(samples: int) -> Iterator[str]:
    """What is wrong with steps of so many samples."""
    if samples < 2:
        yield (
            "kto needs the answers of other samples in a step, but a step has only one sample; raise "
            "gradient_accumulation_steps"
        )


def divergence(gains: Tensor) -> Tensor:
    """The ``kl`` of a step, from the sum of the mismatched answers' gains and their number."""
    return (gains[0] / gains[1].clamp(min=1)).clamp(min=0).float()
