"""Samples of maximum length without data, for dry runs."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.types import JsonObject
from mca_models.media import ImageSpan
from mca_train.data.sample_images import SampleImages
from mca_train.data.token_dataset import VALUES
from mca_train.plan.vision_memory import Images


class LongestSamples(Dataset[JsonObject]):
    """Dataset of samples of ``length`` tokens, all of which count.

    Args:
        count: Number of samples.
        length: Tokens of each sequence.
        sides: Prefixes of the sequences of a sample; empty: a sample is one sequence.
        numbers: Extra numbers per sequence.
        images: Images of each sequence; None: there are none.
    """

    def __init__(
        self,
        count: int,
        length: int,
        sides: Sequence[str] = (),
        numbers: int = 1,
        images: Images | None = None,
    ) -> None:
        self._count, self._length, self._numbers = count, length, numbers
        self._images = None if images is None else _blank(images)
        self._prefixes = [f"{side}_" for side in sides] or [""]

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, ``[samples]`` or ``[samples, sequences per sample]``."""
        shape = (self._count, len(self._prefixes)) if len(self._prefixes) > 1 else (self._count,)
        return np.full(shape, self._length, dtype=np.int64)

    def __getitem__(self, index: int) -> JsonObject:
        ids = torch.ones(self._length, dtype=torch.int64)
        zeros = torch.zeros(self._numbers, dtype=torch.float64)
        made: JsonObject = {"input_ids": ids, "labels": ids, VALUES: zeros}
        if self._images is not None:
            made["images"] = self._images
        return {f"{prefix}{name}": value for prefix in self._prefixes for name, value in made.items()}


def _blank(images: Images) -> SampleImages:
    """Return blank images, one text token apart."""
    step, side = images.tokens + 1, images.side
    places = tuple(ImageSpan(number * step, side, side) for number in range(images.count))
    return SampleImages(places, lambda: _PIXELS[images.tower.form](images))


def _patches(images: Images) -> dict[str, torch.Tensor]:
    along = images.side * images.tower.merge
    grid = torch.tensor([[1, along, along]] * images.count)
    tower = images.tower
    patch = (3, tower.patch, tower.patch) if tower.kind == "kimi_k25_vision" else (tower.values,)
    return {"pixel_values": torch.zeros(images.patches, *patch), "image_grid_thw": grid}


def _tiles(images: Images) -> dict[str, torch.Tensor]:
    along = images.side * images.tower.merge * images.tower.patch
    return {"pixel_values": torch.zeros(images.count, 3, along, along)}


def _sized(images: Images) -> dict[str, torch.Tensor]:
    found = _tiles(images)
    return found | {"image_sizes": torch.tensor([found["pixel_values"].shape[2:]] * images.count)}


def _pooled(images: Images) -> dict[str, torch.Tensor]:
    along = torch.arange(images.side * images.tower.merge)
    positions = torch.cartesian_prod(along, along).flip(1).expand(images.count, -1, -1)
    return {
        "pixel_values": torch.zeros(*positions.shape[:2], images.tower.values),
        "image_position_ids": positions,
    }


_PIXELS = {"patches": _patches, "tiles": _tiles, "sizes": _sized, "pooled": _pooled}
