"""Mixture of several sources in one dataset, with a share of the samples for each.

An epoch has as many samples as all sources together. A source with fewer samples than its share is repeated; of one
with more, a seeded subset is used, the same in every epoch. The sampler determines the order, so a run resumes on any
layout.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.printable import counted
from mca_train.data.token_dataset import Sample, describe_order

if TYPE_CHECKING:
    from mca_train.data.token_dataset import PairDataset, TokenDataset


class Mixture(Dataset[Sample]):
    """Dataset of several sources; each item has the index of its ``source``.

    Args:
        parts: Samples of each source.
        names: Names of the sources in logs.
        weights: Relative shares; None: every sample is used once.
        seed: Seed of the subsets.
    """

    def __init__(
        self,
        parts: "Sequence[TokenDataset | PairDataset]",
        names: Sequence[str],
        weights: Sequence[float] | None,
        seed: int,
    ) -> None:
        self.parts, self.names = tuple(parts), tuple(names)
        sizes = np.array([len(part) for part in parts])
        counts = sizes if weights is None else shares(weights, int(sizes.sum()))
        self._seed = None if weights is None else seed
        draw = np.random.default_rng(seed)
        picks = [_picks(int(size), int(count), draw) for size, count in zip(sizes, counts, strict=True)]
        self.sources: NDArray[np.int64] = np.repeat(np.arange(len(picks)), [len(some) for some in picks])
        self.indices: NDArray[np.int64] = np.concatenate(picks)
        self.epochs = tuple((counts / np.maximum(sizes, 1)).tolist())

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, or of both sequences of each pair."""
        found = [part.lengths[self.indices[self.sources == source]] for source, part in enumerate(self.parts)]
        return np.concatenate(found)

    def __getitem__(self, index: int) -> Sample:
        source = int(self.sources[index])
        return {**self.parts[source][int(self.indices[index])], "source": torch.tensor(source)}

    @property
    def has_images(self) -> bool:
        """True if any sample may have images."""
        return any(part.has_images for part in self.parts)

    @property
    def order_description(self) -> str:
        """Description of the samples and their order."""
        parts = zip(self._counts(), self.parts, self.names, strict=True)
        description = ", ".join(
            f"{count} of {len(part)} samples of {describe_order(part) or name}" for count, part, name in parts
        )
        return description if self._seed is None else f"{description}, picked by seed {self._seed}"

    def _counts(self) -> NDArray[np.int64]:
        return np.bincount(self.sources, minlength=len(self.parts))

    def describe(self) -> str:
        """Describe the number of samples of each source."""
        counts = self._counts()
        return ", ".join(
            f"{name} {count:,} of {counted(len(part), 'sample')} ({epochs:.2f} epochs)"
            for name, count, part, epochs in zip(self.names, counts, self.parts, self.epochs, strict=True)
        )


def shares(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Distribute ``total`` samples by ``weights``: at least one each, by the largest remainders."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    for place in np.argsort(np.floor(exact) - exact, kind="stable"):
        if counts.sum() >= total:
            break
        counts[place] += 1
    return counts


def _picks(size: int, count: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Return the indices of a source's samples: full passes, and a random subset for the rest."""
    whole, rest = divmod(count, size)
    some = np.sort(draw.permutation(size)[:rest])
    return np.concatenate([np.tile(np.arange(size), whole), some])
