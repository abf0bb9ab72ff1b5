"""The ranges that Transformer Engine's modules have seen under delayed fp8 scaling, in files that hold no pickle.

They scale a tensor by the largest values of earlier steps. A module that begins anew scales by 1, with which small
gradients become 0. Transformer Engine's own extra states are pickles, which it refuses to load. Other recipes keep
nothing.

All ranks of a stage agree on the largest values after every pass, so that one of them writes for all, under the names
that modules have in the whole model. With ``tp_only_amax_red`` replicas go on with the ranges of the first.
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
    """What this rank writes for its stage, if anything; collective."""
    if _delayed_recipe(chunks) is None:
        return {}
    modules = dict(_modules(chunks))
    if not modules:  # a stage without layers: on all of its ranks
        return {}
    ahead = _largest_of_coming_passes(modules)
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
    """Writes what was collected to ``folder/fp8_<rank>.safetensors``."""
    if ranges:
        save_file(ranges, folder / f"{_PREFIX}{rank}.safetensors")


def load(folder: Path, chunks: Sequence[Chunk]) -> None:
    """Restores what was saved, on whatever layout; modules that it does not know begin anew, with a warning."""
    recipe = _delayed_recipe(chunks)
    if recipe is None:
        return
    saved: dict[str, TensorInfo] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.safetensors")):
        with naming_read_errors(path):
            saved |= read_header(path).tensors
    anew = [name for name, module in _modules(chunks) if not _restore(name, module, recipe, saved)]
    if anew:
        _log.warning(
            "%s: holds no fp8 ranges of %s (%s, ...), which begin anew: it was written with another recipe or "
            "another expert_model_parallel_size",
            folder,
            counted(len(anew), "module"),
            anew[0],
        )


def _delayed_recipe(chunks: Sequence[Chunk]) -> Upstream:
    """The recipe of this run; None if there is none or it keeps nothing."""
    config = chunks[0].config
    if not config.fp8:
        return None
    from megatron.core.fp8_utils import get_fp8_recipe

    recipe = get_fp8_recipe(config)
    return recipe if recipe.delayed() else None


def _modules(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Upstream]]:
    """Modules that may keep ranges, by the name that they have in the whole model, or on each expert rank."""
    for chunk in chunks:
        of_layers: dict[str, str] = {}
        modules = dict(chunk.named_modules())
        for name, module in modules.items():
            parent, _, number = name.rpartition(".")
            if parent.endswith("layers") and hasattr(module, "layer_number"):
                number = str(module.layer_number - 1)
            # these are numbered on each rank: others where a rank has more of them
            if parent.endswith("local_experts"):
                number += f"_of_{len(modules[parent])}"
            whole = f"{of_layers[parent]}.{number}" if parent else number
            of_layers[name] = whole
            if hasattr(module, "fp8_meta"):
                yield whole, module


def _largest_of_coming_passes(modules: dict[str, Upstream]) -> dict[str, Tensor]:
    """What an evaluation has left for the next forward pass, in which the ranks of this stage agree on it."""
    own = {
        name: module.fp8_meta[_PASSES[0]].amax_history[0]
        if _PASSES[0] in module.fp8_meta
        else torch.zeros(3 * getattr(module, "num_gemms", 1), device=platform.current_device())
        for name, module in modules.items()
    }
    together = groups.max_over_stage(torch.cat(list(own.values())))
    return dict(zip(own, together.split([tensor.numel() for tensor in own.values()]), strict=True))


def _restore(name: str, module: Upstream, recipe: Upstream, saved: dict[str, TensorInfo]) -> bool:
    """Whether ``saved`` has what ``module`` begins with."""
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
