"""Numbers of each step, kept until a log is due: ranks talk only then, or when a checkpoint takes them along."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""From this rank's numbers to those of all ranks, element by element; collective."""


class StepRows:
    """A row of numbers for every step since the last log.

    Rows that a checkpoint brings along are those of all ranks, so a run may go on with them on another layout; and
    they are kept apart until they are added up, so that an interval that was cut adds up to the same bits.

    Args:
        width: Numbers in a row.
    """

    def __init__(self, width: int) -> None:
        self._mine: list[Tensor] = []
        self._counts: list[Sequence[float]] = []
        self.before = torch.zeros(0, width, dtype=torch.float64)

    def add(self, row: Tensor, counts: Sequence[float] = ()) -> None:
        """One step's numbers on this rank: a ``row`` of the device's, then ``counts``, which the host has."""
        self._mine.append(row.double())
        self._counts.append(counts)

    def all_ranks(self, reduce: Reduce) -> Tensor:
        """``[steps, width]``; every rank calls this at the same step."""
        if not self._mine:
            return self.before
        rows = torch.stack(self._mine)
        counts = torch.tensor(self._counts, dtype=rows.dtype, device=rows.device).reshape(len(rows), -1)
        return torch.cat([self.before, reduce(torch.cat([rows, counts], 1)).cpu()])

    def flush(self, reduce: Reduce) -> Tensor:
        """The same, and begins anew."""
        rows = self.all_ranks(reduce)
        self._mine, self._counts, self.before = [], [], rows[:0]
        return rows

    def restore(self, rows: Sequence[Sequence[float]]) -> None:
        """Goes on from the ``rows`` of all ranks; numbers that were not yet counted when they were written are 0."""
        self._mine, self._counts = [], []
        width = self.before.shape[1]
        full = [[*row, *[0.0] * (width - len(row))] for row in rows]
        self.before = torch.tensor(full, dtype=torch.float64).reshape(len(rows), width)
