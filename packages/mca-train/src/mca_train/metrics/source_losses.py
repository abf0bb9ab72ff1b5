"""Loss of each source of a mixture, as means over its targets between two logs."""

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.metrics.metric_accumulator import MetricAccumulator


class SourceLosses(MetricAccumulator):
    """``loss/<source>`` of the sources that had targets since the last log.

    Args:
        sources: Their names, the same on every rank.
        device: Device of the sums.
    """

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        super().__init__(tuple(f"loss/{name}" for name in sources), device)

    def add_tokens(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add the cross entropies ``[b, s]`` of a micro-batch."""
        if batch.sources is None:
            return
        token_sources = batch.sources[batch.segments.clamp(max=len(batch.sources) - 1)].flatten()
        mask = batch.loss_mask.flatten().double()
        for column, values in enumerate((losses.detach().flatten().double() * mask, mask)):
            self._sums[:, column].index_add_(0, token_sources, values)

    def flush(self) -> dict[str, float]:
        """Return the means and reset; collective."""
        if not self.names:
            return {}
        self.end_step()
        total = self._steps.flush(groups.sum_over_data).sum(0).reshape(-1, 2).tolist()
        return {name: loss / count for name, (loss, count) in zip(self.names, total, strict=True) if count}
