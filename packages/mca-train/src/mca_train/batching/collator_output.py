"""Batches that a user's ``data_collator`` returns, in the form that `collate` takes.

Collators of TRL and LLaMA-Factory return preference pairs as all chosen rows and then all rejected ones; others number
the sequences of a row in ``attention_mask``, or return the pixels of images.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_models.images import ImagePlace
from mca_train.data.sample_images import SampleImages, within
from mca_train.types import Sample

_ROWS = ("input_ids", "labels", "attention_mask", "num_tokens", "values")


@dataclass(frozen=True, kw_only=True)
class CollatorFormat:
    """How batches of a ``data_collator`` are read.

    Args:
        labels_are_shifted: Labels are those of the next token, as a collator of ``tokens[:-1]`` and ``tokens[1:]``
            returns them.
        takes_pairs: The collator gets whole preference pairs; it returns all chosen rows and then all rejected rows.
    """

    labels_are_shifted: bool = False
    takes_pairs: bool = False


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How a model's images appear among tokens.

    Args:
        token: The placeholder's id.
        merge: Patches of one token, on each side.
    """

    token: int
    merge: int


def interleave_pairs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``batch`` with its rows in the order chosen, rejected, chosen, rejected; images are `images_of_rows`'s."""
    rows = len(batch["input_ids"])
    order = pair_order(rows)
    made = dict(batch)
    for name in _ROWS:
        if isinstance(batch.get(name), Tensor):
            made[name] = batch[name][order]
    if isinstance(batch.get("position_ids"), Tensor):
        made["position_ids"] = batch["position_ids"].index_select(-2, torch.tensor(order))
    return made


def pair_order(rows: int) -> list[int]:
    """Return the row that comes at each position when pairs are interleaved."""
    if rows % 2:
        raise McaError(
            f"data_collator made {counted(rows, 'row')} of preference pairs; return all chosen rows, then all rejected"
        )
    return [row for pair in range(rows // 2) for row in (pair, rows // 2 + pair)]


def images_of_rows(batch: Mapping[str, Tensor], images: ImageFormat | None) -> list[SampleImages | None]:
    """Return the images of each row of a Hugging Face batch (``pixel_values`` and ``image_grid_thw``).

    Raises:
        McaError: The batch has videos, images that the model does not take, or not as many as placeholders.
    """
    rows = len(batch["input_ids"])
    if media := [name for name in batch if "video" in name or "audio" in name or name == "input_features"]:
        raise McaError(
            f"data_collator made {media[0]}; only images are supported, leave videos and audio out"
        )
    if batch.get("pixel_values") is None:
        return [None] * rows
    if images is None or batch.get("image_grid_thw") is None:
        raise McaError(
            "data_collator made pixel_values without image_grid_thw, or for a model without an image token; expected "
            "both, as processors of Qwen2-VL to Qwen3.5 and GLM-4V return them"
        )
    grids, pixels = batch["image_grid_thw"], batch["pixel_values"]
    tokens = [(int(high) // images.merge, int(wide) // images.merge) for _, high, wide in grids]
    starts = [0, *grids.prod(1).cumsum(0).tolist()]
    found: list[SampleImages | None] = []
    first = 0
    for ids in batch["input_ids"]:
        where = (ids == images.token).nonzero().flatten().tolist()
        grid_list = within(tokens[first:], len(where))
        if grid_list is None:
            raise McaError(
                f"data_collator made {counted(len(where), 'image placeholder')} in a row, which is not a whole number "
                "of its images; raise the length that samples are cut to"
            )
        last = first + len(grid_list)
        tensors = partial(_pixels, pixels[starts[first] : starts[last]], grids[first:last])
        found.append(SampleImages(_places(where, grid_list), tensors) if grid_list else None)
        first = last
    if first != len(grids):
        raise McaError(f"data_collator made {counted(len(grids), 'image')}, of which rows have only {first}")
    return found


def _pixels(pixels: Tensor, grids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": pixels, "image_grid_thw": grids}


def _places(where: list[int], grids: list[tuple[int, int]]) -> tuple[ImagePlace, ...]:
    first, found = 0, []
    for rows, columns in grids:
        found.append(ImagePlace(where[first], rows, columns))
        first += rows * columns
    return tuple(found)


def split_rows(
    batch: Mapping[str, Tensor], images: list[SampleImages | None], counts: list[bool]
) -> Iterator[tuple[Sample, bool]]:
    """Yield the sequences of each row, which ``attention_mask`` numbers 1, 2, ...; 0 is padding.

    Args:
        batch: With ``input_ids``, ``labels`` and ``attention_mask`` ``[b, s]``.
        images: Of each row.
        counts: Whether each row counts.
    """
    for row, (ids, labels, mask) in enumerate(
        zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    ):
        for number in range(1, int(mask.max()) + 1):
            where = (mask == number).nonzero().flatten()
            if not len(where):
                continue
            start, end = int(where[0]), int(where[-1]) + 1
            if end - start != len(where):
                raise McaError(
                    f"data_collator made an attention_mask whose sequence {number} is not in one piece; number "
                    "sequences 1, 2, ... from left to right, 0 for padding"
                )
            sequence = {"input_ids": ids[start:end], "labels": labels[start:end]}
            yield sequence | _images_between(images[row], start, end), counts[row]


def _images_between(images: SampleImages | None, start: int, end: int) -> dict[str, SampleImages]:
    """Return the images of a row that are within one of its sequences."""
    if images is None:
        return {}
    numbers = [n for n, place in enumerate(images.places) if start <= place.start < end]
    if not numbers:
        return {}
    places = tuple(
        ImagePlace(place.start - start, place.rows, place.columns)
        for place in images.places[numbers[0] : numbers[-1] + 1]
    )
    return {"images": SampleImages(places, partial(_some, images, numbers[0], numbers[-1] + 1))}


def _some(images: SampleImages, first: int, last: int) -> dict[str, Tensor]:
    made = images.tensors()
    starts = [0, *made["image_grid_thw"].prod(1).cumsum(0).tolist()]
    return _pixels(made["pixel_values"][starts[first] : starts[last]], made["image_grid_thw"][first:last])
