"""Streams of weights: models that send them, what came, and senders that keep no order."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny_vision
import torch

from mca_models.megatron.tensors import CODES, to_numpy
from mca_models.storage.safetensors import read_header
from reference import make_reference

SMALL = 30_000
"""Bytes of a bucket: several, and some tensors that are larger."""

Facts = dict[str, tuple[str, tuple[int, ...], str]]


def checkpoint_of(case: str, folder: Path) -> Path:
    """A random model of ``case`` in bf16, with a vision part or without."""
    if case in tiny_vision.CASES:
        return Path(tiny_vision.save(case, folder / case, "bfloat16"))
    return make_reference(case, folder, "bfloat16").path


def facts_of(name: str, tensor: torch.Tensor) -> tuple[str, tuple[str, tuple[int, ...], str]]:
    array = to_numpy(tensor).reshape(-1).view(np.uint8)
    return name, (CODES[tensor.dtype], tuple(tensor.shape), hashlib.sha256(array.data).hexdigest())


def stored(path: Path) -> Facts:
    """Code, shape and checksum of every tensor of a directory."""
    found = {}
    for file in path.glob("*.safetensors"):
        for name, info in read_header(file).tensors.items():
            digest = hashlib.sha256(info.array().reshape(-1).view(np.uint8).data).hexdigest()
            found[name] = (info.dtype, info.shape, digest)
    return found


def in_disorder(tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Each tensor whole, or its rows in up to three pieces, all in a random order."""
    draw = random.Random(5)
    pieces: list[Any] = []
    for name, tensor in tensors.items():
        if draw.random() < 0.5 or tensor.ndim == 0:
            pieces.append((name, tensor))
            continue
        step = -(-len(tensor) // 3)
        pieces += [(name, tensor[row : row + step], row) for row in range(0, len(tensor), step)]
    draw.shuffle(pieces)
    for name, tensor, *start in pieces:
        lent = tensor.clone()
        yield (name, lent, *start)
        lent.fill_(float("nan"))  # the sender's buffer is used again


def names_and_bytes(named: tuple[str, torch.Tensor]) -> tuple[str, bytes]:
    return named[0], to_numpy(named[1]).tobytes()
