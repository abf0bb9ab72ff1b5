"""Kernels of other packages for linear attention and state-space layers (``mca-models[kernels]``).

They are used on CUDA where they are installed, and in half precision alone: what is asked for in fp32 is asked for
exactly. Plain torch computes everything else.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

import torch

from mca_models.megatron import platform
from mca_models.megatron.types import MegatronConfig

Kernel = Callable[..., object]
_log = logging.getLogger(__name__)

_WHERE: Mapping[str, tuple[str, str]] = {
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "chunk_kda": ("fla.ops.kda", "flash-linear-attention"),
    "causal_conv1d_fn": ("causal_conv1d", "causal-conv1d"),
    "mamba_chunk_scan_combined": ("mamba_ssm.ops.triton.ssd_combined", "mamba-ssm"),
}
"""By the kernel's name, the module that has it, and the package that brings the module."""


def find_kernel(name: str, config: MegatronConfig) -> Kernel | None:
    """The kernel ``name`` for a model of ``config`` on the device that trains, or None; see ``kernel``."""
    return kernel(name, platform.device_type(), config.params_dtype, bool(config.deterministic_mode))


@cache
def kernel(name: str, device: str, dtype: torch.dtype, deterministic: bool = False) -> Kernel | None:
    """The kernel ``name``, or None where plain torch computes; which of both is logged, once.

    Args:
        name: One of ``_WHERE``.
        device: The type of the device that computes.
        dtype: Of what is computed with.
        deterministic: The same bits every time are asked for, which no kernel promises.
    """
    module, package = _WHERE[name]
    found, why = None, ""
    if device != "cuda":
        why = f"the device is {device}"
    elif deterministic:
        why = "deterministic_mode is on"
    elif dtype not in (torch.bfloat16, torch.float16):
        why = f"the model is in {str(dtype).removeprefix('torch.')}"
    else:
        try:
            found = getattr(import_module(module), name)
        except (
            ImportError,
            AttributeError,
            OSError,
            RuntimeError,
        ) as error:  # also what does not fit this GPU
            why = f"{package} cannot be used ({error}); install mca-models[kernels]"
    _log.info("%s: %s", name, f"the kernel of {package}" if found else f"plain torch, as {why}")
    return found
