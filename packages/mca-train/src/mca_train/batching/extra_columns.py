"""`WithValues` hands out samples with numbers beside their sequences, such as what a reference model thinks of them.

What the numbers mean is known to whoever makes them and to the loss that reads them from a micro-batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_train.batching.packing import sequence_lengths
from mca_train.data.token_dataset import VALUES, order_of
from mca_train.types import Sample, SampleSource


class WithValues(Dataset[Sample]):
    """``dataset`` with a further number for each sequence.

    Args:
        dataset: In memory.
        values: ``[samples, sequences of a sample]``.
        sides: Names of the sequences of a sample; none: it is one.
    """

    def __init__(self, dataset: SampleSource, values: NDArray[np.float64], sides: Sequence[str] = ()) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_in_words = order_of(dataset)
        self._dataset, self._values = dataset, values
        self._prefixes = [f"{side}_" for side in sides] or [""]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = dict(self._dataset[index])
        for prefix, value in zip(self._prefixes, self._values[index], strict=True):
            before = [sample[prefix + VALUES]] if prefix + VALUES in sample else []
            sample[prefix + VALUES] = torch.cat([*before, torch.tensor([value], dtype=torch.float64)])
        return sample


class Rows(Dataset[Sample]):
    """Some samples of ``dataset``.

    Args:
        dataset: In memory.
        rows: Their numbers.
    """

    def __init__(self, dataset: SampleSource, rows: NDArray[np.int64]) -> None:
        self.lengths = sequence_lengths(dataset)[rows]
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[int(self._rows[index])]
