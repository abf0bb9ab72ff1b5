"""Inputs of towers of several files or samples, joined into those of one batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_PADDING = {"image_position_ids": -1}
"""Values of padding other than 0."""


def join_tensors(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of all parts by name; a part may have some of the names.

    Pixels, spectrograms and masks are padded to the largest in all axes but the first.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: torch.cat(
            _pad_to_largest([part[name] for part in parts if name in part], _PADDING.get(name, 0))
        )
        for name in names
    }


def _pad_to_largest(read: Sequence[Tensor], value: int) -> list[Tensor]:
    largest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in read), strict=True)]
    return [_padded(each, largest, value) for each in read]


def _padded(tensor: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
    padding = [pad for own in reversed(missing) for pad in (0, own)]
    return torch.nn.functional.pad(tensor, padding, value=value) if any(missing) else tensor
