"""Inputs of dry runs: samples of maximum length without data, and even MoE routing."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.types import JsonObject
from mca_models.media import ImageSpan
from mca_models.megatron.features.sequence_media import join_tensors
from mca_models.megatron.platform import replaced
from mca_train.data.sample_images import SampleImages
from mca_train.data.token_dataset import VALUES
from mca_train.dry_run.fake_values import FakeValues
from mca_train.losses.moe_aux import routers
from mca_train.plan.audio_memory import Clips, PlannedMedia
from mca_train.plan.vision_memory import Form, Images
from mca_train.types import Upstream

Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class LongestSamples(Dataset[JsonObject]):
    """Dataset of samples of ``length`` tokens, all of which count.

    Args:
        count: Number of samples.
        length: Tokens of each sequence.
        sides: Prefixes of the sequences of a sample; empty: a sample is one sequence.
        numbers: Extra numbers per sequence.
        media: Media of each sequence; None: there are none.
    """

    def __init__(
        self,
        count: int,
        length: int,
        sides: Sequence[str] = (),
        numbers: int = 1,
        media: PlannedMedia | None = None,
    ) -> None:
        self._count, self._length, self._numbers = count, length, numbers
        self._images = None if media is None else _blank(media)
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


def _blank(media: PlannedMedia) -> SampleImages:
    """Return blank images, videos and silent clips, with text between them."""
    clips, places, start = media.clips, list[ImageSpan](), 0
    seen = [images for images in (media.images, media.videos) if images is not None]
    for images in seen:
        step, side = images.tokens + images.num_text_tokens, images.side
        shape = (side, side) if images.extent is None else (1, images.tokens)
        places += [ImageSpan(start + number * step, *shape) for number in range(images.count)]
        start += images.length
    if clips is not None:
        step = clips.tokens + 1
        places += [
            ImageSpan(start + number * step, 1, clips.tokens, medium="audio") for number in range(clips.count)
        ]

    def tensors() -> dict[str, torch.Tensor]:
        found = [_PIXELS[images.tower.form](images) for images in seen]
        return join_tensors(found if clips is None else [*found, _spectrograms(clips)])

    return SampleImages(tuple(places), tensors)


def _spectrograms(clips: Clips) -> dict[str, torch.Tensor]:
    windows = clips.count * clips.windows
    sides = (clips.computed, clips.bands) if clips.frames_first else (clips.bands, clips.computed)
    found = {"input_features": torch.zeros(windows, *sides)}
    if not clips.mask:
        return found
    last = clips.frames - (clips.windows - 1) * clips.computed
    lengths = torch.tensor(([clips.computed] * (clips.windows - 1) + [last]) * clips.count)
    inside = torch.arange(clips.computed) < lengths[:, None]
    return {**found, clips.mask: inside if clips.frames_first else inside.long()}


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


def _joined_tiles(images: Images) -> dict[str, torch.Tensor]:
    tower, tiles = images.tower, 1 if images.extent is None else images.extent.tiles
    found = {
        "pixel_values": torch.zeros(images.count, tiles, 3, tower.tile, tower.tile),
        "image_sizes": torch.tensor([[images.pixels, images.pixels]] * images.count),
    }
    if not images.has_image_count:
        return found
    num_images = -tiles if images.videos is not None else images.count
    return found | {"batch_num_images": torch.tensor([num_images] * images.count)}


def _shapes(images: Images) -> dict[str, torch.Tensor]:
    along = images.side * images.tower.merge
    pixels = torch.zeros(images.count, along**2, images.tower.values)
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(pixels.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([[along, along]] * images.count),
    }


def _loose_patches(images: Images) -> dict[str, torch.Tensor]:
    side, extent = images.tower.patch, images.extent
    assert extent is not None, "the plan knows the size of each slice"
    return {
        "pixel_values": torch.zeros(images.patches, 3, side, side),
        "target_sizes": torch.tensor(extent.sizes * images.count),
    }


_PIXELS: dict[Form, Callable[[Images], dict[str, torch.Tensor]]] = {
    "patches": _patches,
    "tiles": _tiles,
    "sizes": _sized,
    "pooled": _pooled,
    "lone_tiles": lambda images: {"pixel_values": _tiles(images)["pixel_values"][:, None]},
    "marked_tiles": lambda images: _tiles(images) | {"grids": torch.tensor([[1, 1]] * images.count)},
    "joined_tiles": _joined_tiles,
    "shapes": _shapes,
    "loose_patches": _loose_patches,
}


def route_evenly(chunks: Iterable[torch.nn.Module], answers: FakeValues | None = None) -> None:
    """Make the routers of ``chunks`` send token t to experts k t, ..., k t + k - 1, modulo the number of experts.

    Args:
        chunks: Megatron models.
        answers: Known values of fake tensors, which receive the routing; None: the tensors are real.
    """
    for router in routers(chunks):
        router.routing = _even(router.routing, answers, router.topk)


def _even(routing: Routing, answers: FakeValues | None, topk: int) -> Routing:
    def routed(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, chosen = routing(*args, **kwargs)
        even = even_routing_map(chosen.shape[0], chosen.shape[1], topk)
        if answers is not None:
            answers.set_value(chosen, even)
        else:
            chosen.data.copy_(even)  # the backward pass may have saved this tensor
        return probabilities, chosen

    return routed


def even_routing_map(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """Return the routing map ``[tokens, experts]`` bool."""
    choice = np.zeros((tokens, experts), dtype=np.bool_)
    first = np.arange(tokens)[:, None] * topk
    choice[np.arange(tokens)[:, None], (first + np.arange(topk)) % experts] = True
    return _real(choice)


def _real(array: object) -> torch.Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        tensor: torch.Tensor = torch.as_tensor(array)
        return tensor


@contextmanager
def convert_known_values(answers: FakeValues) -> Iterator[None]:
    """Context in which ``Tensor.numpy`` and ``torch.tensor`` take the known values of fake tensors."""
    plain = torch.Tensor.numpy

    def either(tensor: torch.Tensor, **options: bool) -> object:
        return plain(tensor, **options) if type(tensor) is torch.Tensor else np.array(answers.to_list(tensor))

    make = torch.tensor

    def make_known(data: object, **options: Upstream) -> torch.Tensor:
        if isinstance(data, list) and any(isinstance(each, torch.Tensor) for each in data):
            data = [each.item() if isinstance(each, torch.Tensor) else each for each in data]
        return make(data, **options)

    with replaced(torch.Tensor, "numpy", either), replaced(torch, "tensor", make_known):
        yield


@contextmanager
def skip_sinkhorn_iterations() -> Iterator[None]:
    """Context in which Sinkhorn routing stops after one iteration, as its tolerance test needs real values.

    Each iteration needs the same memory.
    """
    from megatron.core.transformer.moe import router

    with replaced(router, "sinkhorn", partial(router.sinkhorn, tol=math.inf)):
        yield
