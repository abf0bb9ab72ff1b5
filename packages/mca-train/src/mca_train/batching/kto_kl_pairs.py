"""`Mismatched` gives each sample the answer of another one after its own prompt, beside the answer that it has."""

import numpy as np
import torch
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_train.batching.packing import sequence_lengths
from mca_train.data.token_dataset import IGNORED, order_of
from mca_train.types import Sample, SampleSource


class Mismatched(Dataset[Sample]):
    """``dataset`` whose samples have ``other_input_ids`` and ``other_labels`` too.

    Args:
        dataset: In memory; an answer begins with the first target.
        group: So many samples in a row exchange their answers, each with the one before it, or with one further
            before where neighbours have the same prompt.
        length: Tokens of a sequence; what is longer is cut.
    """

    def __init__(self, dataset: SampleSource, group: int, length: int | None) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_in_words = order_of(dataset)
        self._dataset, self._group, self._length = dataset, group, length
        self._distances: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample, other = self._dataset[index], self._dataset[self._before(index)]
        own, its = (_answer_of(item["labels"]) for item in (sample, other))
        made = {
            f"other_{name}": torch.cat([sample[name][:own], other[name][its:]])[: self._length]
            for name in ("input_ids", "labels")
        }
        if (images := sample.get("images")) is not None:
            made["other_images"] = images
        for item, start in ((sample, own), (other, its)):
            if _has_image_from(item, start):
                raise McaError(
                    "kto exchanges answers, and an answer has an image; give images to prompts alone"
                )
        return {**sample, **made}

    def _before(self, index: int) -> int:
        first = index - index % self._group
        size = min(self._group, len(self) - first)
        if size > 1:
            return first + (index - first - self._distance(first, size)) % size
        own = self._prompt(index)  # alone at the end of the dataset
        before = range(index - 1, max(index - self._group, 0) - 1, -1)
        return next((number for number in before if self._prompt(number) != own), max(index - 1, 0))

    def _distance(self, first: int, size: int) -> int:
        """How far apart samples of the group from ``first`` exchange: the least that fewest prompts equal."""
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
        tokens = torch.as_tensor(sample["input_ids"])[: _answer_of(sample["labels"])]
        return tuple(tokens.tolist())


def _answer_of(labels: torch.Tensor) -> int:
    """Where the answer begins."""
    found = (torch.as_tensor(labels) != IGNORED).nonzero()
    return int(found[0]) if len(found) else len(labels)


def _has_image_from(sample: Sample, start: int) -> bool:
    images = sample.get("images")
    return images is not None and any(place.start >= start for place in images.places)
