"""Counts of targets and tokens of a step on all ranks, the denominators of its losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch

ItemCount = Callable[[MicroBatch], Tensor]
"""Function that returns the loss count of a micro-batch of this rank."""


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
