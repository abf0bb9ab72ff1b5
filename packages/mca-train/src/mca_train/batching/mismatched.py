"""`Mismatched` gives each sample the answer of another one after its own prompt, beside the answer that it has."""

import torch
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_train.batching.packing import sequence_lengths
from mca_train.data.token_dataset import IGNORED
from mca_train.types import Sample, SampleSource


class Mismatched(Dataset[Sample]):
    """``dataset`` whose samples have ``other_input_ids`` and ``other_labels`` too.

    Args:
        dataset: In memory; an answer begins with the first target.
        group: So many samples in a row exchange their answers, each with the one before it.
        length: Tokens of a sequence; what is longer is cut.
    """

    def __init__(self, dataset: SampleSource, group: int, length: int | None) -> None:
        self.lengths = sequence_lengths(dataset)
        self._dataset, self._group, self._length = dataset, group, length

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
        last = min(first + self._group, len(self)) - 1
        if first == last:  # alone at the end of the dataset
            return max(index - 1, 0)
        return index - 1 if index > first else last


def _answer_of(labels: torch.Tensor) -> int:
    """Where the answer begins."""
    found = (torch.as_tensor(labels) != IGNORED).nonzero()
    return int(found[0]) if len(found) else len(labels)


def _has_image_from(sample: Sample, start: int) -> bool:
    images = sample.get("images")
    return images is not None and any(place.start >= start for place in images.places)
