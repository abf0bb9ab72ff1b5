"""Per-step values, kept until a log or a checkpoint reduces them over ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Element-wise reduction over all ranks; collective."""


class StepRows:
    """One row of values for every step since the last log.

    Rows from a checkpoint are already reduced over all ranks, so a run may resume on another layout. They stay separate
    until they are summed, so an interrupted interval sums to the same bits.

    Args:
        width: Values in a row.
    """

    def __init__(self, width: int) -> None:
        self._mine: list[Tensor] = []
        self._counts: list[Sequence[float]] = []
        self.before = torch.zeros(0, width, dtype=torch.float64)

    def add(self, row: Tensor, counts: Sequence[float] = ()) -> None:
        """Add one step's values on this rank: a ``row`` on the device, then ``counts`` on the host."""
        self._mine.append(row.double())
        self._counts.append(counts)

    def all_ranks(self, reduce: Reduce) -> Tensor:
        """Return ``[steps, width]`` over all ranks; every rank calls this at the same step."""
        if not self._mine:
            return self.before
        rows = torch.stack(self._mine)
        counts = torch.tensor(self._counts, dtype=rows.dtype, device=rows.device).reshape(len(rows), -1)
        return torch.cat([self.before, reduce(torch.cat([rows, counts], 1)).cpu()])

    def flush(self, reduce: Reduce) -> Tensor:
        """Return the same as `all_ranks` and reset."""
        rows = self.all_ranks(reduce)
        self._mine, self._counts, self.before = [], [], rows[:0]
        return rows

    def restore(self, rows: Sequence[Sequence[float]]) -> None:
        """Continue from reduced ``rows``; values that an older version did not count are 0."""
        self._mine, self._counts = [], []
        width = self.before.shape[1]
        full = [[*row, *[0.0] * (width - len(row))] for row in rows]
        self.before = torch.tensor(full, dtype=torch.float64).reshape(len(rows), width)
