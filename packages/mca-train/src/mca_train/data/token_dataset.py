"""Tokenized samples in flat arrays, which forked ranks share, and pairs of them.

The package ``batching`` pads, packs and shifts them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

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
