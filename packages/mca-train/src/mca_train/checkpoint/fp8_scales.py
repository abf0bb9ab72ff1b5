"""Amax histories and scales of Transformer Engine's delayed fp8 scaling, in files without pickle.

They scale a tensor by the largest values of earlier steps. A new module starts with scale 1, which flushes small
gradients to 0. Transformer Engine's own extra states are pickles and are not loaded. Other recipes keep no state.

All ranks of a stage agree on the largest values after every pass. One rank therefore writes for the stage, under the
global module names. With ``tp_only_amax_red`` all replicas resume with the history of the first.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mca_config.files import naming_read_errors
from mca_config.printable import counted
from mca_models.megatron import platform
from mca_models.storage.safetensors import TensorInfo, read_header
from mca_train import groups
from mca_train.types import Chunk, Upstream

_log = logging.getLogger(__name__)
_PREFIX = "fp8_"
_PASSES = ("scaling_fwd", "scaling_bwd")


def collect(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """Return the tensors that this rank writes for its stage, if any; collective."""
    if _delayed_recipe(chunks) is None:
        return {}
    modules = dict(_modules(chunks))
    if not modules:  # a stage without layers: on all of its ranks
        return {}
    ahead = _next_amax(modules)
    if not groups.is_stage_leader():
        return {}
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        for key in _PASSES if _PASSES[0] in module.fp8_meta else ():
            state = module.fp8_meta[key]
            history = state.amax_history.clone()
            if key == _PASSES[0]:
                history[0] = ahead[name]
            tensors |= {f"{name}.{key}.scale": state.scale, f"{name}.{key}.amax_history": history}
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def save(folder: Path, rank: int, ranges: dict[str, Tensor]) -> None:
    """Write the result of `collect` to ``folder/fp8_<rank>.safetensors``."""
    if ranges:
        save_file(ranges, folder / f"{_PREFIX}{rank}.safetensors")


def load(folder: Path, chunks: Sequence[Chunk]) -> None:
    """Restore saved scales, on any layout; modules without saved scales start over, with a warning."""
    recipe = _delayed_recipe(chunks)
    if recipe is None:
        return
    saved: dict[str, TensorInfo] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.safetensors")):
        with naming_read_errors(path):
            saved |= read_header(path).tensors
    missing = [name for name, module in _modules(chunks) if not _restore(name, module, recipe, saved)]
    if missing:
        _log.warning(
            "%s: holds no fp8 scales of %s (%s, ...), which start over: it was written with another recipe or "
            "another expert_model_parallel_size",
            folder,
            counted(len(missing), "module"),
            missing[0],
        )


def _delayed_recipe(chunks: Sequence[Chunk]) -> Upstream:
    """Return the recipe of this run; None without one or if it keeps no state."""
    config = chunks[0].config
    if not config.fp8:
        return None
    from megatron.core.fp8_utils import get_fp8_recipe

    recipe = get_fp8_recipe(config)
    return recipe if recipe.delayed() else None


def _modules(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Upstream]]:
    """Yield modules that may keep scales, with their global names (experts: names on each expert rank)."""
    for chunk in chunks:
        names: dict[str, str] = {}
        modules = dict(chunk.named_modules())
        for name, module in modules.items():
            parent, _, number = name.rpartition(".")
            if parent.endswith("layers") and hasattr(module, "layer_number"):
                number = str(module.layer_number - 1)
            # numbered on each rank, so the name includes their number per rank
            if parent.endswith("local_experts"):
                number += f"_of_{len(modules[parent])}"
            full_name = f"{names[parent]}.{number}" if parent else number
            names[name] = full_name
            if hasattr(module, "fp8_meta"):
                yield full_name, module


def _next_amax(modules: dict[str, Upstream]) -> dict[str, Tensor]:
    """Return the amax that an evaluation leaves for the next forward pass, reduced over this stage."""
    local = {
        name: module.fp8_meta[_PASSES[0]].amax_history[0]
        if _PASSES[0] in module.fp8_meta
        else torch.zeros(3 * getattr(module, "num_gemms", 1), device=platform.current_device())
        for name, module in modules.items()
    }
    reduced = groups.max_over_stage(torch.cat(list(local.values())))
    return dict(zip(local, reduced.split([tensor.numel() for tensor in local.values()]), strict=True))


def _restore(name: str, module: Upstream, recipe: Upstream, saved: dict[str, TensorInfo]) -> bool:
    """Restore ``module``; return False if ``saved`` has no matching state."""
    found = saved.get(f"{name}.{_PASSES[0]}.scale")
    if found is None:
        return False
    gemms = found.shape[0] // 3
    if gemms != getattr(module, "num_gemms", gemms):
        return False
    module.fp8_meta["num_gemms"] = gemms
    module.fp8_meta["recipe"] = recipe
    module.init_fp8_meta_tensors(recipe)
    for key in _PASSES:
        state = module.fp8_meta[key]
        history = torch.from_numpy(saved[f"{name}.{key}.amax_history"].read())
        rows = min(len(history), len(state.amax_history))
        state.scale.copy_(torch.from_numpy(saved[f"{name}.{key}.scale"].read()))
        state.amax_history[:rows].copy_(history[:rows])
    return True
