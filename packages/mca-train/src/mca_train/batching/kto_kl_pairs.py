"""KL pairs for KTO: each prompt with the completion of another sample, in addition to its own completion."""

import numpy as np
import torch
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_train.batching.packing import sequence_lengths
from mca_train.data.token_dataset import IGNORED, describe_order
from mca_train.types import Sample, SampleSource


class KtoKlPairs(Dataset[Sample]):
    """Dataset whose samples have ``other_input_ids`` and ``other_labels`` as well.

    Args:
        dataset: In-memory dataset; a completion begins with the first target.
        group: Number of consecutive samples that exchange completions: each takes the one of the sample before it, or
            of an earlier one if both have the same prompt.
        length: Maximum number of tokens; longer sequences are truncated.
    """

    def __init__(self, dataset: SampleSource, group: int, length: int | None) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_description = describe_order(dataset)
        self._dataset, self._group, self._length = dataset, group, length
        self._distances: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample, other = self._dataset[index], self._dataset[self._partner(index)]
        own, its = (_answer_start(item["labels"]) for item in (sample, other))
        made = {
            f"other_{name}": torch.cat([sample[name][:own], other[name][its:]])[: self._length]
            for name in ("input_ids", "labels")
        }
        if (images := sample.get("images")) is not None:
            made["other_images"] = images
        for item, start in ((sample, own), (other, its)):
            if _has_image_after(item, start):
                raise McaError(
                    "kto exchanges completions, and a completion has an image; put images in prompts only"
                )
        return {**sample, **made}

    def _partner(self, index: int) -> int:
        first = index - index % self._group
        size = min(self._group, len(self) - first)
        if size > 1:
            return first + (index - first - self._offset(first, size)) % size
        own = self._prompt(index)  # the only sample of the last group
        before = range(index - 1, max(index - self._group, 0) - 1, -1)
        return next((number for number in before if self._prompt(number) != own), max(index - 1, 0))

    def _offset(self, first: int, size: int) -> int:
        """Return the smallest offset in the group at ``first`` that pairs the fewest equal prompts."""
        if first not in self._distances:
            prompts = np.array([hash(self._prompt(first + number)) for number in range(size)])
            equal = ((prompts == np.roll(prompts, distance)).sum() for distance in range(1, size))
            known: list[int] = []
            for count in equal:
                known.append(int(count))
                if not count:
                    break
            self._distances[first] = 1 + int(np.argmin(known))
        return self._distances[first]

    def _prompt(self, index: int) -> tuple[int, ...]:
        sample = self._dataset[index]
        tokens = torch.as_tensor(sample["input_ids"])[: _answer_start(sample["labels"])]
        return tuple(tokens.tolist())


def _answer_start(labels: torch.Tensor) -> int:
    """Return the index of the first target."""
    found = (torch.as_tensor(labels) != IGNORED).nonzero()
    return int(found[0]) if len(found) else len(labels)


def _has_image_after(sample: Sample, start: int) -> bool:
    images = sample.get("images")
    return images is not None and any(place.start >= start for place in images.places)
