"""Datasets with extra numbers per sequence, such as the log-probabilities of a reference model.

The task that computes the numbers and the loss that reads them from a micro-batch define what they mean.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_train.batching.packing import sequence_lengths
from mca_train.data.token_dataset import VALUES, describe_order
from mca_train.types import Sample, SampleSource


class ExtraColumns(Dataset[Sample]):
    """Dataset that appends one number to the ``values`` of each sequence.

    Args:
        dataset: In-memory dataset.
        values: Numbers to append, ``[samples, sequences per sample]``.
        sides: Prefixes of the sequences of a sample; empty: a sample is one sequence.
    """

    def __init__(self, dataset: SampleSource, values: NDArray[np.float64], sides: Sequence[str] = ()) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_description = describe_order(dataset)
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


class RowSubset(Dataset[Sample]):
    """Subset of ``dataset`` that keeps the lengths of its samples.

    Args:
        dataset: In-memory dataset.
        rows: Indices of the samples.
    """

    def __init__(self, dataset: SampleSource, rows: NDArray[np.int64]) -> None:
        self.lengths = sequence_lengths(dataset)[rows]
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[int(self._rows[index])]
