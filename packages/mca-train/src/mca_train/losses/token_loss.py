"""From what the last pipeline stage computes to the loss of a step.

The loss of a step is the mean over all target tokens of the global batch. Every micro-batch hands on
its *sum* and its number of targets; both are added over micro-batches, data- and context-parallel ranks, and the
gradients are divided once. So the result does not depend on the layout. A custom loss may count something else than
targets, and what it counts need not be whole, as the sum of tokens' weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train.batching.micro_batch import MicroBatch
from mca_train.groups import Ranks
from mca_train.types import Upstream

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor]]
"""``(output of the last stage, micro-batch) -> (sum over targets, number of targets)``, of this rank."""


@dataclass(frozen=True)
class StepLoss:
    """Sums of one step on this rank; only the last pipeline stage knows ``loss_sum`` and ``targets``."""

    loss_sum: Tensor
    targets: Tensor


def require_sums(made: Upstream, trainer: str) -> tuple[Tensor, Tensor]:
    """What ``trainer``'s ``compute_loss`` returned; of a view a copy, as Megatron frees what a stage gives.

    Raises:
        McaError: It is not a sum and a number.
    """
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(value, Tensor) for value in made):
        loss, number = made
        return loss.clone() if loss._is_view() else loss, number
    raise McaError(
        f"{trainer}.compute_loss returned {made!r:.80}; expected two tensors: the sum over the targets, and "
        "their number"
    )


def token_loss(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The default loss: ``output [b, s]`` is the cross entropy of each token."""
    losses = output.float() * batch.loss_mask
    return losses.sum(), batch.loss_mask.sum().int()


def of_sequences(losses: Tensor, real: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The sum over sequences (or pairs) that count, and their number, where context-parallel ranks all know them.

    Every context rank has the whole loss, and the gradient of its own tokens.

    Args:
        losses: Of each.
        real: 1 for those that count, else 0.
        ranks: This one among the others.
    """
    total, size = (losses * real).sum(), ranks.layout.cp
    shared = total + (total / size - total).detach()
    return shared, real.sum().int() * int(ranks.context_parallel_rank == 0)


def num_targets(batch: MicroBatch) -> Tensor:
    """What `token_loss` counts."""
    return batch.loss_mask.sum()


def megatron_loss(
    function: LossFunction, batch: MicroBatch, kept: list[Tensor]
) -> Callable[[Tensor], tuple[Upstream, ...]]:
    """``function`` as Megatron's schedules call it; ``kept`` gets the sum and the number."""

    def loss(output: Tensor) -> tuple[Upstream, ...]:
        loss_sum, targets = function(output, batch)
        both = torch.stack([loss_sum.detach().double(), targets.double()])
        kept.append(both)
        return loss_sum, targets.to(torch.int), both

    return loss


def add_up(kept: list[Tensor], device: torch.device) -> StepLoss:
    """The sums of a step from those of its micro-batches; zeros on stages without the loss."""
    total = torch.stack(kept).sum(0) if kept else torch.zeros(2, dtype=torch.float64, device=device)
    return StepLoss(total[0], total[1])
