"""`TokenDataset` holds tokenized samples in flat arrays, which forked ranks share.

It does not pad, pack or shift: that comes later, in ``batching``.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.types import JsonObject

if TYPE_CHECKING:
    import datasets

    from mca_train.data.sample_images import SampleImages

IGNORED = -100  # the label of a token that is not a target, as in Hugging Face
VALUES = "values"
"""The key of a sample's numbers, ``[numbers]`` fp64, such as its class; of a preference pair each side has some."""

Sample = JsonObject
"""``input_ids`` and, unless every token is a target, ``labels``; of a preference pair both of each answer.

All are tensors but ``images`` (`SampleImages`), which samples of text do not have."""
Samples = Union[Dataset[Sample], Sequence[Sample], "datasets.Dataset", "datasets.IterableDataset"]
"""The samples of a run, in memory or made as they are iterated (torch's ``IterableDataset`` is a ``Dataset``)."""


class ImageSource(Protocol):
    """The images of the samples of a dataset."""

    def get(self, index: int, tokens: NDArray[np.int32]) -> "SampleImages | None":
        """Those of the sample ``index``, which has these ``tokens``; None: it has none."""


def describe_order(dataset: object) -> str:
    """What decides in which order ``dataset`` has its samples, in words; empty: it does not say that."""
    return str(getattr(dataset, "order_description", ""))


class TokenDataset(Dataset[Sample]):
    """Samples of tokens, with the positions that count in the loss.

    Each item is ``{"input_ids": [length], "labels": [length]}``; labels are *not* shifted (the label of a
    position is the token at that position), as in Hugging Face.

    Args:
        tokens: All samples one after another.
        offsets: Where each sample begins, and the end of the last: ``[num_samples + 1]``.
        is_target: Which of ``tokens`` count; None: all.
        values: Numbers of each sample, ``[num_samples, numbers]``; None: there are none.
        images: Of the samples; None: they are text.

    Attributes:
        order_in_words: What decides in which order the samples come; empty: nobody knows.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        is_target: NDArray[np.bool_] | None = None,
        values: NDArray[np.float64] | None = None,
        images: ImageSource | None = None,
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.is_target = is_target
        self.values = values
        self.images = images
        self.order_description = ""

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> "TokenDataset":
        """From ``(tokens, is_target)`` of each sample."""
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
        """``tokens`` cut every ``length``; the last block holds what is left, if it can have a target."""
        offsets = np.arange(0, len(tokens), length, dtype=np.int64)
        tail = len(tokens) - int(offsets[-1]) if len(tokens) else 0
        if tail < 2:
            return cls(tokens[: len(tokens) - tail], offsets if len(tokens) else np.zeros(1, np.int64))
        return cls(tokens, np.append(offsets, len(tokens)).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_images(self) -> bool:
        """Whether any sample has."""
        return self.images is not None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each sample."""
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
