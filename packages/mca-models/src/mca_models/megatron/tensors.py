"""NumPy arrays of files to torch tensors and back, bfloat16 included."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mca_models.storage.dtypes import numpy_dtype

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Safetensors codes of the dtypes that weights have."""
DTYPE_OF = {code: dtype for dtype, code in CODES.items()}
"""The inverse of ``CODES``."""


def to_torch(array: "np.ndarray[Any, Any]") -> Tensor:
    """A tensor over the memory of ``array``."""
    if array.dtype == numpy_dtype("BF16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """An array over the memory of ``tensor`` (copied to the CPU, made contiguous)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("BF16"))
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
