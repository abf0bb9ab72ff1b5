"""Tokenized samples in flat arrays, which forked ranks share; pairs of them, and mixtures of several sources.

The package ``batching`` pads, packs and shifts them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.printable import counted
from mca_config.types import JsonObject

if TYPE_CHECKING:
    import datasets

    from mca_train.data.sample_images import DatasetImages

IGNORED = -100  # label of tokens that are not targets, as in Hugging Face
VALUES = "values"
"""Key of a sample's extra numbers, ``[numbers]`` fp64, such as its class; each side of a preference pair has some."""

Sample = JsonObject
"""Sample with ``input_ids`` and, unless every token is a target, ``labels``; preference pairs have both per side.

All values are tensors except ``images`` (`SampleImages`), which text samples do not have."""
Samples = Union[Dataset[Sample], Sequence[Sample], "datasets.Dataset", "datasets.IterableDataset"]
"""Samples of a run, in memory or streamed (torch's ``IterableDataset`` is a ``Dataset``)."""


def describe_order(dataset: object) -> str:
    """Return the description of the order of ``dataset``; empty: unknown."""
    return str(getattr(dataset, "order_description", ""))


class TokenDataset(Dataset[Sample]):
    """Dataset of tokens with a mask of targets.

    Each item is ``{"input_ids": [length], "labels": [length]}``; labels are *not* shifted (the label of a
    position is the token at that position), as in Hugging Face.

    Args:
        tokens: Tokens of all samples, concatenated.
        offsets: Index of each sample's first token, and the total: ``[num_samples + 1]``.
        is_target: Mask of the targets in ``tokens``; None: all are targets.
        values: Extra numbers of each sample, ``[num_samples, numbers]``; None: there are none.
        images: Images of the samples; None: text only.

    Attributes:
        order_description: Description of the order of the samples; empty: unknown.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        is_target: NDArray[np.bool_] | None = None,
        values: NDArray[np.float64] | None = None,
        images: "DatasetImages | None" = None,
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.is_target = is_target
        self.values = values
        self.images = images
        self.order_description = ""

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> "TokenDataset":
        """Build a dataset from ``(tokens, is_target)`` of each sample."""
        tokens, targets, lengths = [], [], [0]
        for ids, mask in samples:
            tokens.append(np.asarray(ids, dtype=np.int32))
            targets.append(np.asarray(mask, dtype=np.bool_))
            lengths.append(len(ids))
        if not tokens:
            return cls(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.bool_))
        return cls(np.concatenate(tokens), np.cumsum(lengths, dtype=np.int64), np.concatenate(targets))

    @classmethod
    def in_blocks(cls, tokens: NDArray[np.int32], length: int) -> "TokenDataset":
        """Split ``tokens`` into blocks of ``length``; a shorter last block is kept if it has a target."""
        offsets = np.arange(0, len(tokens), length, dtype=np.int64)
        tail = len(tokens) - int(offsets[-1]) if len(tokens) else 0
        if tail < 2:
            return cls(tokens[: len(tokens) - tail], offsets if len(tokens) else np.zeros(1, np.int64))
        return cls(tokens, np.append(offsets, len(tokens)).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_images(self) -> bool:
        """True if any sample has images."""
        return self.images is not None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> Sample:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        ids = torch.from_numpy(self.tokens[start:end].astype(np.int64))
        labels = ids.clone()
        if self.is_target is not None:
            labels[torch.from_numpy(~self.is_target[start:end])] = IGNORED
        sample: Sample = {"input_ids": ids, "labels": labels}
        if self.values is not None:
            sample[VALUES] = torch.from_numpy(self.values[index].copy())
        found = None if self.images is None else self.images.get(index, self.tokens[start:end])
        return sample if found is None else {**sample, "images": found}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self[index] for index in indices]


class PairDataset(Dataset[Sample]):
    """Dataset of preference pairs; an item has ``chosen_*`` and ``rejected_*`` ``input_ids`` and ``labels``.

    Args:
        sequences: Chosen and rejected sequences in turn.
    """

    def __init__(self, sequences: TokenDataset) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences) // 2

    @property
    def order_description(self) -> str:
        """Description of the order of the pairs; empty: unknown."""
        return self.sequences.order_description

    @order_description.setter
    def order_description(self, words: str) -> None:
        self.sequences.order_description = words

    @property
    def has_images(self) -> bool:
        """True if any sample has images."""
        return self.sequences.has_images

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of chosen and rejected sequences: ``[pairs, 2]``."""
        return self.sequences.lengths.reshape(-1, 2)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        sides = {"chosen": self.sequences[2 * index], "rejected": self.sequences[2 * index + 1]}
        return {f"{side}_{name}": values for side, item in sides.items() for name, values in item.items()}


class Mixture(Dataset[Sample]):
    """Dataset of several sources, with a share of the samples for each; each item has the index of its ``source``.

    An epoch has as many samples as all sources together. A source with fewer samples than its share is repeated; of
    one with more, a seeded subset is used, the same in every epoch.

    Args:
        parts: Samples of each source.
        names: Names of the sources in logs.
        weights: Relative shares; None: every sample is used once.
        seed: Seed of the subsets.
    """

    def __init__(
        self,
        parts: Sequence[TokenDataset | PairDataset],
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
