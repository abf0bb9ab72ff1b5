"""Which device this process computes on, and what goes with it.

Nothing is patched here.
"""

import os
from functools import cache

import torch

from mca_config.errors import McaError
from mca_models.megatron.platform._patch import Device

_VARIABLE = "MCA_DEVICE"


@cache
def device_type() -> Device:
    """``cuda`` where torch sees a GPU, else ``cpu``; the variable MCA_DEVICE overrides.

    Raises:
        McaError: MCA_DEVICE names something else, or CUDA where there is none.
    """
    chosen = os.environ.get(_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise McaError(f"{_VARIABLE}=cuda, but torch sees no GPU; unset it or set {_VARIABLE}=cpu")
    if chosen != "cuda" and chosen != "cpu":
        raise McaError(f"{_VARIABLE} is {chosen!r}; expected cuda or cpu")
    return "cuda" if chosen == "cuda" else "cpu"


def current_device() -> torch.device:
    """The device of this rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def backend() -> str:
    """The torch.distributed backend for this device."""
    return "nccl" if device_type() == "cuda" else "gloo"
