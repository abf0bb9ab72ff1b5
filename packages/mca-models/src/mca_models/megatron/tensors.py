"""Conversion between NumPy arrays of files and torch tensors, casts, and seeded generators.

This module performs no I/O and does not depend on ranks.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.values import can_overflow, overflow, round_to_odd
from mca_models.weights.arrays import NumpyArray

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Safetensors codes of the dtypes that weights have."""
DTYPE_OF = {code: dtype for dtype, code in CODES.items()}
"""The inverse of ``CODES``."""


def weights_dtype(chunk: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a chunk's weights; that of the model if the chunk is an empty stage."""
    parameter = next(chunk.parameters(), None)
    found: torch.dtype = chunk.config.params_dtype if parameter is None else parameter.dtype  # type: ignore[assignment, union-attr]
    return found


def to_torch(array: NumpyArray) -> Tensor:
    """Return a tensor over the memory of ``array``."""
    if array.dtype == numpy_dtype("BF16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> NumpyArray:
    """Return an array over the memory of ``tensor`` (copied to the CPU, made contiguous)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("BF16"))
    array: NumpyArray = tensor.numpy()
    return array


def copy_finite(target: Tensor, source: Tensor, name: str) -> None:
    """Copy ``source`` into ``target``, cast if necessary, as `mca_models.storage.values` does for NumPy.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    target.copy_(_odd(source, target.dtype))
    _require_finite(source, target, name)


def cast_finite(source: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return ``source`` in ``dtype``; itself if it has that dtype.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    target = _odd(source, dtype).to(dtype)
    _require_finite(source, target, name)
    return target


def _odd(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``source``, from fp64 to bf16 rounded to odd fp32 first, because torch rounds twice."""
    if (source.dtype, dtype) != (torch.float64, torch.bfloat16):
        return source
    return torch.from_numpy(round_to_odd(source.detach().cpu().contiguous().numpy()))


def _require_finite(source: Tensor, target: Tensor, name: str) -> None:
    there, here = (str(tensor.dtype).removeprefix("torch.") for tensor in (source, target))
    if not can_overflow(there, here) or not bool((infinite := target.isinf()).any()):
        return
    values = source.expand_as(target)[infinite.to(source.device)]
    for value in values[values.isfinite()][:1].tolist():
        raise overflow(name, f"{value:g}", here)


def seeded_generator(seed: str) -> torch.Generator:
    """Return a CPU generator that draws the same numbers for the same text on every layout and rank."""
    digest = hashlib.sha256(seed.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
