"""What a step has of targets and tokens on all ranks: what its losses are the means of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch


@dataclass(frozen=True)
class StepCounts:
    """Of the global batch, by how many tokens further ahead than one a layer predicts (0: the model itself).

    Args:
        targets: Targets that have as many more tokens of their sequence before them.
        tokens: Tokens, without padding, that have as many of their sequence after them.
        num_segments: Sequences of the micro-batch that has most, of this replica.
    """

    targets: tuple[float, ...]
    tokens: tuple[float, ...]
    num_segments: int


def count_step(batch: StepBatch, prediction_layers: int) -> StepCounts:
    """Counts ``batch`` of all ranks; collective."""
    depths = range(prediction_layers + 1)
    mine = torch.stack([_counts(micro, depths) for micro in batch.micro_batches]).sum(0)
    targets, tokens = groups.sum_over_samples_on_host(mine).tolist()
    segments = max(micro.num_segments for micro in batch.micro_batches)
    return StepCounts(tuple(targets), tuple(tokens), segments)


def _counts(micro: MicroBatch, depths: range) -> Tensor:
    """``[2, depths]``: targets and tokens."""
    targets = [micro.targets_at(depth).sum() for depth in depths]
    tokens = [(micro.following >= depth).sum() for depth in depths]
    return torch.stack([torch.stack(targets), torch.stack(tokens)]).double()
