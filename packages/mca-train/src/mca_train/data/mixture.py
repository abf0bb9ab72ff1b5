"""`Mixture` is several sources as one dataset, in which each has its share of the samples.

An epoch has as many samples as the sources have together. A source with less than its share comes several times, whole
passes first; of one with more some samples are left out, the same in every epoch, drawn by the seed. The order of an
epoch is the sampler's, so a run resumes as any other does, on every layout.
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
    from mca_train.data.preferences import PairDataset
    from mca_train.data.token_dataset import TokenDataset


class Mixture(Dataset[Sample]):
    """Samples of several sources; an item also says which one it is from, as ``source``.

    Args:
        parts: The samples of each source.
        names: What logs call them.
        weights: Their shares, in proportion; None: every sample comes once.
        seed: Of which samples are taken where not all are.
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
        """Tokens of each sample, or of both of each pair."""
        found = [part.lengths[self.indices[self.sources == source]] for source, part in enumerate(self.parts)]
        return np.concatenate(found)

    def __getitem__(self, index: int) -> Sample:
        source = int(self.sources[index])
        return {**self.parts[source][int(self.indices[index])], "source": torch.tensor(source)}

    @property
    def has_images(self) -> bool:
        """Whether any sample may have."""
        return any(part.has_images for part in self.parts)

    @property
    def order_description(self) -> str:
        """What decides which samples come in which order."""
        parts = zip(self._counts(), self.parts, self.names, strict=True)
        told = ", ".join(
            f"{count} of {len(part)} samples of {describe_order(part) or name}" for count, part, name in parts
        )
        return told if self._seed is None else f"{told}, picked by seed {self._seed}"

    def _counts(self) -> NDArray[np.int64]:
        return np.bincount(self.sources, minlength=len(self.parts))

    def described(self) -> str:
        """How much there is of each source."""
        counts = self._counts()
        return ", ".join(
            f"{name} {count:,} of {counted(len(part), 'sample')} ({epochs:.2f} epochs)"
            for name, count, part, epochs in zip(self.names, counts, self.parts, self.epochs, strict=True)
        )


def shares(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """``total`` samples dealt out by ``weights``: at least one each, the largest remainders rounded up."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    for place in np.argsort(np.floor(exact) - exact, kind="stable"):
        if counts.sum() >= total:
            break
        counts[place] += 1
    return counts


def _picks(size: int, count: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Which samples of a source come: all of them so many times, and some once more."""
    whole, rest = divmod(count, size)
    some = np.sort(draw.permutation(size)[:rest])
    return np.concatenate([np.tile(np.arange(size), whole), some])
