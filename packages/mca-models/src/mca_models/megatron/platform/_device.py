"""Device of this process and its properties, and the variables by which a launcher assigns ranks and devices.

Nothing is patched here.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from functools import cache

import torch

from mca_config.errors import McaError, raise_problems
from mca_config.printable import counted
from mca_models.megatron.platform._patch import Device

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


_RANK = ("RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_NUMBERS = (*_RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def require_launcher(environment: Mapping[str, str]) -> None:
    """Check the variables of a process that was started as one of several ranks.

    Raises:
        McaError: Variables are missing or no numbers; lists all.
    """
    raise_problems(list(_problems(environment)), "the launcher's variables")


def _problems(environment: Mapping[str, str]) -> Iterator[str]:
    unfit = [name for name in _NUMBERS if name in environment and not environment[name].isdecimal()]
    yield from (f"{name} is {environment[name]!r}; expected a number" for name in unfit)
    if missing := [name for name in (*_RANK, *_RENDEZVOUS) if not environment.get(name)]:
        yield (
            f"{' and '.join(missing)} must be set, so that ranks find each other; set them, or start the ranks with "
            "torchrun"
        )
    if unfit or missing:
        return
    rank, size = (int(environment[name]) for name in _RANK)
    if rank >= size:
        yield f"RANK {rank} is not below WORLD_SIZE {size}; ranks are counted from 0"


def local_rank(environment: Mapping[str, str], gpus: int) -> int:
    """Return the number of this process's GPU.

    Args:
        environment: The variables of this process.
        gpus: Number of GPUs that it sees.

    Raises:
        McaError: There is no such GPU, or several ranks would use the same one.
    """
    local = environment.get("LOCAL_RANK")
    is_alone = any(name not in environment for name in _RANK) or environment["WORLD_SIZE"] == "1"
    if is_alone and local == "-1":  # set by scripts of transformers and DeepSpeed for "not distributed"
        return 0
    if local is None:
        if gpus > 1 and not is_alone:
            raise McaError(
                f"LOCAL_RANK is not set, so that all ranks of this machine would take the first of its {gpus} GPUs; "
                "set it to the rank's number on the machine (SLURM_LOCALID), or start the ranks with torchrun"
            )
        return 0
    if not local.isdecimal():
        raise McaError(f"LOCAL_RANK is {local!r}; expected a number")
    if int(local) >= gpus:
        raise McaError(
            f"LOCAL_RANK is {local}, but this process sees {counted(gpus, 'GPU')}; start at most one rank "
            "for each GPU, and set it to 0 where each rank sees only its own"
        )
    return int(local)
