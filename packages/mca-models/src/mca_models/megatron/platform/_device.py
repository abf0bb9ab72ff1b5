"""Device of this process, and its properties. Nothing is patched here."""

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
    """Return ``cuda`` if torch sees a GPU, else ``cpu``; the variable MCA_DEVICE overrides.

    Raises:
        McaError: MCA_DEVICE names something else, or CUDA where there is none.
    """
    if os.environ.get(_VARIABLE) != "cpu":
        # Megatron relies on it for the order of communication; CUDA reads it at start-up
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    chosen = os.environ.get(_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise McaError(f"{_VARIABLE}=cuda, but torch sees no GPU; unset it or set {_VARIABLE}=cpu")
    if chosen != "cuda" and chosen != "cpu":
        raise McaError(f"{_VARIABLE} is {chosen!r}; expected cuda or cpu")
    return "cuda" if chosen == "cuda" else "cpu"


def current_device() -> torch.device:
    """Return the device of this rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def set_device() -> None:
    """Select the GPU that the launcher assigned to this process; does nothing on a CPU.

    Raises:
        McaError: There is no such GPU, or several ranks would use the same one.
    """
    if device_type() == "cuda":
        torch.cuda.set_device(local_rank(os.environ, torch.cuda.device_count()))


@cache
def engine_problem() -> str | None:
    """Return why Transformer Engine cannot be used; None if it can. An installed package may fail to load."""
    if device_type() != "cuda":
        return "there is no GPU"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # e.g. a missing library, or a build for another torch
        first = (str(error).splitlines() or [""])[0][:200]
        return f"Transformer Engine does not load ({type(error).__name__}: {first})"
    return None


@cache
def fp8_problem(recipe: str) -> str | None:
    """Return why this GPU does not support fp8 with ``recipe``; None if it does, or without Transformer Engine."""
    if engine_problem() is not None:
        return None
    # before 2.9 it is in the latter module
    names = (f"transformer_engine.pytorch.{name}" for name in ("quantization", "fp8"))
    engine = importlib.import_module(next(filter(importlib.util.find_spec, names))).FP8GlobalStateManager
    special = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}
    available, reason = getattr(engine, special.get(recipe, "is_fp8_available"))()
    return None if available else str(reason)


def backend() -> str:
    """Return the torch.distributed backend for this device."""
    return "nccl" if device_type() == "cuda" else "gloo"
