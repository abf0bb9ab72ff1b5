"""Which device this process computes on, and what goes with it.

Nothing is patched here.
"""

import importlib
import importlib.util
import os
from functools import cache

import torch

from mca_config.errors import McaError
from mca_models.megatron.platform._patch import Device
from mca_models.megatron.platform.launcher import local_rank

_VARIABLE = "MCA_DEVICE"


@cache
def device_type() -> Device:
    """``cuda`` where torch sees a GPU, else ``cpu``; the variable MCA_DEVICE overrides.

    Raises:
        McaError: MCA_DEVICE names something else, or CUDA where there is none.
    """
    if os.environ.get(_VARIABLE) != "cpu":
        # Megatron orders communication by it, and CUDA reads it when it starts
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
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


def set_device() -> None:
    """Makes the GPU that the launcher means this process's own; on a CPU there is nothing to choose.

    Raises:
        McaError: There is no such GPU, or several ranks would take the same one.
    """
    if device_type() == "cuda":
        torch.cuda.set_device(local_rank(os.environ, torch.cuda.device_count()))


@cache
def engine_problem() -> str | None:
    """Why Transformer Engine cannot be used; None if it can. A package that is there may not load."""
    if device_type() != "cuda":
        return "there is no GPU"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a library that is missing, or built for another torch
        first = (str(error).splitlines() or [""])[0][:200]
        return f"Transformer Engine does not load ({type(error).__name__}: {first})"
    return None


@cache
def fp8_problem(recipe: str) -> str | None:
    """Why this machine's GPU has no fp8 with that scaling; None if it has, and where no Transformer Engine is."""
    if engine_problem() is not None:
        return None
    names = (
        f"transformer_engine.pytorch.{name}" for name in ("quantization", "fp8")
    )  # before 2.9 the latter
    engine = importlib.import_module(next(filter(importlib.util.find_spec, names))).FP8GlobalStateManager
    special = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}
    available, reason = getattr(engine, special.get(recipe, "is_fp8_available"))()
    return None if available else str(reason)


def backend() -> str:
    """The torch.distributed backend for this device."""
    return "nccl" if device_type() == "cuda" else "gloo"
