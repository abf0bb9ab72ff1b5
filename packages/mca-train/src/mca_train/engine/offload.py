"""Optimizer state in host memory: Megatron's ``HybridDeviceOptimizer`` inside its other optimizers.

The hybrid optimizer copies every offloaded parameter (``inner`` here) to an optimizer on the host and leaves the others
to one on the device. This module repairs two problems of megatron-core 0.16.1 and 0.19.2, on every device:

- A non-distributed mixed-precision optimizer creates its main parameters after the hybrid one was built, which then
  knows none of them (KeyError). `rebuild_hybrids` builds it again.
- The hybrid state cannot be loaded where a parameter is fp32 (KeyError), the device optimizer's step is not saved, and
  tensors have other names than without offloading. `as_adam` saves and loads it as an Adam state, so a checkpoint
  resumes with any offload fraction, including none.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from mca_models.megatron.platform import FusedAdam
from mca_train.types import HybridOptimizer, MegatronOptimizer, Upstream

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PRECISION_AWARE = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
MASTER = "master_param"
"""Key of a parameter's fp32 copy in Transformer Engine's Adam."""


def singles(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the single optimizers of a chain, or the optimizer itself."""
    found: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return found


def rebuild_hybrids(optimizer: MegatronOptimizer) -> None:
    """Rebuild hybrid optimizers whose parameter groups have changed since they were built."""
    for single in _hybrids(optimizer):
        hybrid = single.optimizer
        params = (param for group in hybrid.param_groups for param in group["params"])
        if any(param not in hybrid.param_to_inner_param for param in params):
            hybrid._init_sub_optimizers()


@contextmanager
def as_adam(optimizer: MegatronOptimizer, *, loading: bool) -> Iterator[None]:
    """Replace every hybrid optimizer by a plain Adam while Megatron saves or loads its state.

    Args:
        optimizer: Megatron's, single or chained.
        loading: The weights are those of the checkpoint already; copy the loaded Adam state back into the hybrid.
    """
    hybrids = [
        (single, single.optimizer, getattr(single.config, _PRECISION_AWARE)) for single in _hybrids(optimizer)
    ]
    loaded = False
    try:
        for single, hybrid, _ in hybrids:
            if loading:
                _copy_to_inner(hybrid)
            single.optimizer = _build_adam(hybrid, _group_tensors(single, hybrid))
            setattr(single.config, _PRECISION_AWARE, False)
        yield
        loaded = loading
    finally:
        for single, hybrid, precision_aware in hybrids:
            plain, single.optimizer = single.optimizer, hybrid
            setattr(single.config, _PRECISION_AWARE, precision_aware)
            if loaded:
                _load_from_adam(hybrid, plain, _group_tensors(single, hybrid))


def reload_main_params(optimizer: MegatronOptimizer) -> None:
    """Copy the model's weights into main parameters and all their copies.

    For hybrid optimizers Megatron refreshes only the copies of half-precision weights.

    Args:
        optimizer: Megatron's, single or chained.
    """
    hybrids = [(single, single.optimizer) for single in _hybrids(optimizer)]
    try:
        for single, hybrid in hybrids:
            single.optimizer = SimpleNamespace(param_groups=hybrid.param_groups)  # not seen as a hybrid
        optimizer.reload_model_params()
    finally:
        for single, hybrid in hybrids:
            single.optimizer = hybrid
    for _, hybrid in hybrids:
        _copy_to_inner(hybrid)
    _reload_te_main_params(optimizer)


@torch.no_grad()
def _reload_te_main_params(optimizer: MegatronOptimizer) -> None:
    """Refresh the main parameters in Transformer Engine's Adam, which Megatron does not refresh."""
    for single in filter(is_precision_aware, singles(optimizer)):
        inner = single.optimizer
        for param in (param for group in inner.param_groups for param in group["params"]):
            if MASTER in inner.state.get(param, {}):
                inner.set_scaled_state(param, MASTER, param.detach().float())


def is_precision_aware(single: MegatronOptimizer) -> bool:
    """Return True if Transformer Engine's Adam holds the optimizer's main parameters."""
    return getattr(single.config, _PRECISION_AWARE) and hasattr(single.optimizer, "set_scaled_state")


def init_precision_aware_state(optimizer: Upstream, *_: object) -> None:
    """Create the state of Transformer Engine's Adam; Megatron's call lacks an argument required since TE 2.1."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.initialize_state(param, store_param_remainders=False)


def _hybrids(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return this rank's Megatron optimizers whose inner optimizer is hybrid."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return [single for single in singles(optimizer) if isinstance(single.optimizer, HybridDeviceOptimizer)]


def _group_tensors(single: MegatronOptimizer, hybrid: HybridOptimizer) -> dict[Tensor, Tensor]:
    """Map each of the hybrid's parameters to the tensor that Megatron expects in the parameter groups.

    The distributed optimizer loads main parameters into its groups. The others look up model weights in their groups
    and
    load main parameters separately.
    """
    inner: dict[Tensor, Tensor] = hybrid.param_to_inner_param
    return inner if hasattr(single, "buffers") else {param: param for param in inner}


def _build_adam(hybrid: HybridOptimizer, tensors: dict[Tensor, Tensor]) -> torch.optim.Optimizer:
    """Build an Adam over ``tensors``, in the order of the hybrid's groups, that shares its state."""
    step = _step(hybrid.sub_optimizers)
    groups = [
        group | {"params": [tensors[param] for param in group["params"]], **({"step": step} if step else {})}
        for group in hybrid.param_groups
    ]
    plain = FusedAdam(groups)
    states = {param: state for single in hybrid.sub_optimizers for param, state in single.state.items()}
    for param, inner in hybrid.param_to_inner_param.items():
        state = states.get(inner) or {name: torch.zeros_like(inner, requires_grad=False) for name in _MOMENTS}
        plain.state[tensors[param]] = {name: state[name] for name in _MOMENTS}
    return plain


def _step(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the step: some optimizers keep it per parameter, others per group."""
    kept = [each for single in optimizers for each in (*single.param_groups, *single.state.values())]
    return int(max((each["step"] for each in kept if "step" in each), default=0))


@torch.no_grad()
def _load_from_adam(
    hybrid: HybridOptimizer, plain: torch.optim.Optimizer, tensors: dict[Tensor, Tensor]
) -> None:
    """Copy the state loaded into ``plain`` and into its ``tensors`` back into the hybrid."""
    for param, inner in hybrid.param_to_inner_param.items():
        if tensors[param] is inner:
            param.data.copy_(inner)
        else:
            inner.data.copy_(param)
    step = _step([plain])
    for single in hybrid.sub_optimizers:
        has_param_step = isinstance(single, torch.optim.AdamW)
        for group in single.param_groups:
            if not has_param_step:
                group["step"] = step
            for inner in group["params"]:
                loaded = plain.state[tensors[hybrid.inner_param_to_orig_param[inner]]]
                single.state[inner] = {name: loaded[name].to(inner.device) for name in _MOMENTS}
                if has_param_step:
                    single.state[inner]["step"] = torch.tensor(float(step))
    hybrid._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def _copy_to_inner(hybrid: HybridOptimizer) -> None:
    """Refresh the copies of parameters."""
    for param, inner in hybrid.param_to_inner_param.items():
        if inner is not param:
            inner.data.copy_(param)
