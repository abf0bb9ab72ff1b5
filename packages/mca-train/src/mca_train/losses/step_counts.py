"""What a step has of targets and tokens on all ranks: what its losses are the means of."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch

ItemCount = Callable[[MicroBatch], Tensor]
"""The number that a loss returns for a micro-batch of this rank."""


@dataclass(frozen=True)
class StepCounts:
    """Of the global batch, by how many tokens further ahead than one a layer predicts (0: the model itself).

    Args:
        targets: Targets that have as many more tokens of their sequence before them; of the model itself what its loss
            is divided by, whatever that counts.
        tokens: Tokens, without padding, that have as many of their sequence after them.
        num_segments: Sequences of the micro-batch that has most, of this replica.
    """

    targets: tuple[float, ...]
    tokens: tuple[float, ...]
    num_segments: int


def count_step(batch: StepBatch, prediction_layers: int, num_items: ItemCount) -> StepCounts:
    """Counts ``batch`` of all ranks, whose loss is divided by ``num_items``; collective."""
    depths = range(prediction_layers + 1)
    mine = torch.stack([_counts(micro, depths, num_items) for micro in batch.micro_batches]).sum(0)
    targets, tokens = groups.sum_over_samples_on_host(mine).tolist()
    segments = max(micro.num_segments for micro in batch.micro_batches)
    return StepCounts(tuple(targets), tuple(tokens), segments)


def _counts(micro: MicroBatch, depths: range, num_items: ItemCount) -> Tensor:
    """``[2, depths]``: targets and tokens."""
    targets = [num_items(micro), *(micro.target_mask(depth).sum() for depth in depths[1:])]
    tokens = [(micro.tokens_remaining >= depth).sum() for depth in depths]
    return torch.stack([torch.stack([count.double() for count in row]) for row in (targets, tokens)])
