"""Loss of a step from the last pipeline stage's output, and the counts of its targets and tokens.

The loss of a step is the mean over all target tokens of the global batch. Every micro-batch returns its *sum* and its
loss count. Both are summed over micro-batches, data- and context-parallel ranks, and the gradients are divided once.
The result does not depend on the layout. A custom loss may count something else than targets, and its count may be a
fraction, such as a sum of token weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.groups import Ranks
from mca_train.types import Upstream

ItemCount = Callable[[MicroBatch], Tensor]
"""Function that returns the loss count of a micro-batch of this rank."""
LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor]]
"""``(output of the last stage, micro-batch) -> (sum over targets, number of targets)``, of this rank."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of the global batch by prediction depth (0: the model itself, 1 and more: MTP layers).

    Args:
        targets: Targets that each depth predicts; for the model itself its loss count.
        tokens: Tokens, without padding, that have at least depth tokens of their sequence after them.
        num_segments: Largest number of sequences in a micro-batch of this replica.
    """

    targets: tuple[float, ...]
    tokens: tuple[float, ...]
    num_segments: int


def count_step(batch: StepBatch, mtp_layers: int, num_items: ItemCount) -> StepCounts:
    """Count ``batch`` on all ranks; ``num_items`` is the model's loss count. Collective."""
    depths = range(mtp_layers + 1)
    local = torch.stack([_counts(micro, depths, num_items) for micro in batch.micro_batches]).sum(0)
    targets, tokens = groups.sum_over_samples_on_host(local).tolist()
    segments = max(micro.num_segments for micro in batch.micro_batches)
    return StepCounts(tuple(targets), tuple(tokens), segments)


def _counts(micro: MicroBatch, depths: range, num_items: ItemCount) -> Tensor:
    """Return ``[2, depths]``: targets and tokens."""
    targets = [num_items(micro), *(micro.target_mask(depth).sum() for depth in depths[1:])]
    tokens = [(micro.tokens_remaining >= depth).sum() for depth in depths]
    return torch.stack([torch.stack([count.double() for count in row]) for row in (targets, tokens)])


@dataclass(frozen=True)
class StepLoss:
    """Sums of one step on this rank; only the last pipeline stage knows ``loss_sum`` and ``targets``."""

    loss_sum: Tensor
    targets: Tensor


def require_sums(result: Upstream, trainer: str) -> tuple[Tensor, Tensor]:
    """Return the checked result of ``trainer``'s ``compute_loss``.

    A view is copied, because Megatron frees a stage's output.

    Raises:
        McaError: It is not a sum and a count.
    """
    if isinstance(result, tuple) and len(result) == 2 and all(isinstance(value, Tensor) for value in result):
        loss, number = result
        return loss.clone() if loss._is_view() else loss, number
    raise McaError(
        f"{trainer}.compute_loss returned {result!r:.80}; expected two tensors: the sum over the targets, and "
        "their number"
    )


def token_loss(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the default loss: ``output [b, s]`` is the cross entropy of each token."""
    losses = output.float() * batch.loss_mask
    return losses.sum(), batch.loss_mask.sum().int()


def sequence_loss(losses: Tensor, real: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the loss sum over sequences (or pairs) and their count, from values that all context ranks share.

    Every context rank has the full loss and the gradient of its tokens.

    Args:
        losses: Loss of each sequence.
        real: 1 for sequences that count, else 0.
        ranks: This rank.
    """
    total, size = (losses * real).sum(), ranks.layout.cp
    shared = total + (total / size - total).detach()
    return shared, real.sum().int() * int(ranks.context_parallel_rank == 0)


def num_targets(batch: MicroBatch) -> Tensor:
    """Return the count of `token_loss`."""
    return batch.loss_mask.sum()


def megatron_loss(
    function: LossFunction, batch: MicroBatch, sums: list[Tensor]
) -> Callable[[Tensor], tuple[Upstream, ...]]:
    """Return ``function`` in the form that Megatron's schedules call; append its sum and count to ``sums``."""

    def loss(output: Tensor) -> tuple[Upstream, ...]:
        loss_sum, targets = function(output, batch)
        both = torch.stack([loss_sum.detach().double(), targets.double()])
        sums.append(both)
        return loss_sum, targets.to(torch.int), both

    return loss
