"""Device platform: makes megatron-core run on this machine, with a GPU or without.

Call ``prepare()`` before anything imports ``megatron``. On a CPU it patches torch and Megatron; the modules group
the patches by subject, each with its reason; on a GPU only device-independent fixes are applied.
"""

import importlib
import logging
import re
import sys
import warnings
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from mca_config.errors import McaError
from mca_models.megatron.platform import (
    checkpoint_queue,
    cross_entropy_dtype,
    cuda,
    mla,
    moe,
    mtp,
    offloading,
    optimizers,
    recompute,
)
from mca_models.megatron.platform._device import (
    backend,
    current_device,
    device_type,
    engine_problem,
    fp8_problem,
    require_launcher,
    set_device,
)
from mca_models.megatron.platform._patch import Patch, replaced
from mca_models.megatron.platform.cuda import without_compile
from mca_models.megatron.platform.fused_adam import FusedAdam

__all__ = [
    "BEFORE_IMPORT",
    "PATCHES",
    "FusedAdam",
    "Patch",
    "backend",
    "close",
    "current_device",
    "device_type",
    "engine_problem",
    "engine_version",
    "fp8_problem",
    "megatron_version",
    "prepare",
    "replaced",
    "require_launcher",
    "set_device",
]

_log = logging.getLogger(__name__)

BEFORE_IMPORT: tuple[Patch, ...] = (cuda.CUDA_CALLS, cuda.CUDA_TENSORS, cuda.ENGINE_ON_CPU)
"""Patches of libraries that Megatron imports, applied before its import."""

PATCHES: tuple[Patch, ...] = (
    cuda.RNG_STATE,
    moe.ROUTER_GEMM_NAME,
    moe.ROUTER_JITTER,
    moe.DROP_BY_POSITION,
    moe.SPLIT_SIZES,
    cross_entropy_dtype.PATCH,
    recompute.RECOMPUTE_WITHOUT_TE,
    recompute.RECOMPUTED_BIAS,
    moe.UNEVEN_COLLECTIVES,
    optimizers.DISTRIBUTED_ADAM,
    optimizers.DP_RESHARDABLE_NO_GRAD,
    recompute.BLOCK_PADDING,
    optimizers.EXPERT_NORM,
    offloading.HYBRID_GRADS,
    offloading.HYBRID_SPLIT,
    offloading.HYBRID_VIEWS,
    offloading.HYBRID_WAIT,
    mla.MLA_FLAGS,
    mtp.MTP_RECOMPUTE,
    optimizers.OPTIMIZER_TE_VERSION,
    mtp.PACKED_ROLL,
    mla.PACKED_ROPE,
    optimizers.PARAMETER_GROUPS,
    optimizers.PLAIN_SGD,
    mtp.MTP_PADDING_MASK,
    mla.MLA_DOWN_PROJECTION,
    checkpoint_queue.PATCH,
    mla.YARN_CACHE,
)
"""Patches of Megatron, applied after its import."""

_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.multi_token_prediction",
)
_NOISE = "`sequence_parallel` is set to `True`, but tensor model parallel size is 1"
_QUIET = ("torch.utils.cpp_extension", "megatron.core.models.gpt.gpt_model")

_applied: list[str] = []


def prepare() -> None:
    """Patch torch, import megatron-core and patch it; further calls do nothing.

    Raises:
        McaError: On a CPU, if megatron-core was imported already.
    """
    if _applied:
        return
    cpu = device_type() == "cpu"
    if cpu and "megatron.core" in sys.modules:
        raise McaError(
            "megatron.core was imported before mca_models.megatron.platform.prepare(), which fails on a machine "
            "without a GPU; import mca_models.megatron first"
        )
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    _make(BEFORE_IMPORT)
    with warnings.catch_warnings(), without_compile() if cpu else nullcontext():
        warnings.simplefilter("ignore")
        for name in _MODULES:
            importlib.import_module(name)
    # warned for every MoE layer with an expert tensor size of 1
    warnings.filterwarnings("ignore", re.escape(_NOISE))
    _make(PATCHES)
    _applied.append("done")


def _make(patches: tuple[Patch, ...]) -> None:
    for patch in patches:
        if device_type() in patch.devices and patch.needed():
            patch.apply()
            _applied.append(patch.name)
            _log.debug("patched %s: %s", patch.name, patch.why)


@cache
def megatron_version() -> tuple[int, ...]:
    """Return the installed megatron-core's version, e.g. ``(0, 16, 1)``."""
    return _numbers(version("megatron-core"))


@cache
def engine_version() -> tuple[int, ...] | None:
    """Return the installed Transformer Engine's version, e.g. ``(2, 20, 2)``; None: not installed."""
    try:
        return _numbers(version("transformer-engine"))
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
