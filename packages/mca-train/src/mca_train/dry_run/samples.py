"""Samples as long as they may be, without data: what a plan trains on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_train.data.token_dataset import VALUES


class LongestSamples(Dataset[dict[str, torch.Tensor]]):
    """Samples of ``length`` tokens, all of which count.

    Args:
        count: Samples.
        length: Tokens of each of their sequences.
        sides: Names of the sequences of a sample, as of a task; none: it is one sequence.
        numbers: That each sequence carries.
    """

    def __init__(self, count: int, length: int, sides: Sequence[str] = (), numbers: int = 1) -> None:
        self._count, self._length, self._numbers = count, length, numbers
        self._prefixes = [f"{side}_" for side in sides] or [""]

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample; of its sequences in columns, if it has several."""
        shape = (self._count, len(self._prefixes)) if len(self._prefixes) > 1 else (self._count,)
        return np.full(shape, self._length, dtype=np.int64)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(self._length, dtype=torch.int64)
        zeros = torch.zeros(self._numbers, dtype=torch.float64)
        made = {"input_ids": ids, "labels": ids, VALUES: zeros}
        return {f"{prefix}{name}": value for prefix in self._prefixes for name, value in made.items()}
