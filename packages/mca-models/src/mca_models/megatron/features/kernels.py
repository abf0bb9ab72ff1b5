"""Kernels of other packages for linear attention and state-space layers (``mca-models[kernels]``).

They are used on CUDA if installed, and only in half precision, so that fp32 stays exact. Otherwise plain torch
computes.
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

_MODULES: Mapping[str, tuple[str, str]] = {
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "chunk_kda": ("fla.ops.kda", "flash-linear-attention"),
    "causal_conv1d_fn": ("causal_conv1d", "causal-conv1d"),
    "selective_scan_fn": ("mamba_ssm.ops.selective_scan_interface", "mamba-ssm"),
    "mamba_chunk_scan_combined": ("mamba_ssm.ops.triton.ssd_combined", "mamba-ssm"),
}
"""Module and package of each kernel by name."""


def find_kernel(name: str, config: MegatronConfig) -> Kernel | None:
    """Return the kernel ``name`` for a model of ``config`` on this machine's device; None: use plain torch."""
    return kernel(name, platform.device_type(), config.params_dtype, bool(config.deterministic_mode))


@cache
def kernel(name: str, device: str, dtype: torch.dtype, deterministic: bool = False) -> Kernel | None:
    """Return the kernel ``name``, or None to use plain torch; log the choice once.

    Args:
        name: One of ``_MODULES``.
        device: The type of the device that computes.
        dtype: Dtype of the inputs.
        deterministic: Require bitwise reproducible results, which no kernel guarantees.
    """
    module, package = _MODULES[name]
    function, why = None, ""
    if device != "cuda":
        why = f"the device is {device}"
    elif deterministic:
        why = "deterministic_mode is on"
    elif dtype not in (torch.bfloat16, torch.float16):
        why = f"the model is in {str(dtype).removeprefix('torch.')}"
    else:
        try:
            function = getattr(import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:  # e.g. an unsupported GPU
            why = f"{package} cannot be used ({error}); install mca-models[kernels]"
    _log.info("%s: %s", name, f"the kernel of {package}" if function else f"plain torch, as {why}")
    return function
