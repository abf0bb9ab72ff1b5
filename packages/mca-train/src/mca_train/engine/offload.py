"""Optimizer state in host memory: Megatron's ``HybridDeviceOptimizer`` inside its other optimizers.

It holds a copy of every offloaded parameter (``inner`` here) in an optimizer on the host, and leaves the rest to one on
the device. Two things go wrong with it in megatron-core 0.16.1 and 0.19.2, on every device:

- A whole optimizer in mixed precision puts its main parameters in place after the hybrid one was made, which then
  knows none of them (KeyError): `rebuild_hybrids`.
- Its own state cannot be loaded where a parameter is fp32 (KeyError), the step of its part on the device is not saved,
  and the tensors have other names than those of an optimizer that is not offloaded: `as_plain`. So a state is
  the same in a checkpoint whatever is offloaded, and resumes with another fraction, or with none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from mca_train.types import HybridOptimizer, MegatronOptimizer, Upstream

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PRECISION_AWARE = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
MASTER = "master_param"
"""What Transformer Engine's Adam calls the fp32 copy of a parameter."""


def rebuild_hybrids(optimizer: MegatronOptimizer) -> None:
    """Makes every hybrid optimizer's parts of the parameters that its groups hold by now."""
    for single in _hybrids(optimizer):
        hybrid = single.optimizer
        held = (param for group in hybrid.param_groups for param in group["params"])
        if any(param not in hybrid.param_to_inner_param for param in held):
            hybrid._init_sub_optimizers()


@contextmanager
def as_plain(optimizer: MegatronOptimizer, *, loading: bool) -> Iterator[None]:
    """A block in which every hybrid optimizer is a plain Adam, for Megatron to save its state or to load one.

    Args:
        optimizer: Megatron's, whole or chained.
        loading: The weights are another checkpoint's already; what is loaded into the plain one is the hybrid's after.
    """
    singles = [
        (single, single.optimizer, getattr(single.config, _PRECISION_AWARE)) for single in _hybrids(optimizer)
    ]
    loaded = False
    try:
        for single, hybrid, _ in singles:
            if loading:
                _copy_to_inner(hybrid)
            single.optimizer = _plain(hybrid, _held(single, hybrid))
            setattr(single.config, _PRECISION_AWARE, False)
        yield
        loaded = loading
    finally:
        for single, hybrid, precision_aware in singles:
            plain, single.optimizer = single.optimizer, hybrid
            setattr(single.config, _PRECISION_AWARE, precision_aware)
            if loaded:
                _take(hybrid, plain, _held(single, hybrid))


def take_weights(optimizer: MegatronOptimizer) -> None:
    """Has main parameters and all copies of them follow weights that others than ``optimizer`` have changed.

    Of hybrids Megatron refreshes copies of half-precision weights alone, not main parameters nor copies of fp32.

    Args:
        optimizer: Megatron's, whole or chained.
    """
    hybrids = [(single, single.optimizer) for single in _hybrids(optimizer)]
    try:
        for single, hybrid in hybrids:
            single.optimizer = SimpleNamespace(param_groups=hybrid.param_groups)  # not to be seen as a hybrid
        optimizer.reload_model_params()
    finally:
        for single, hybrid in hybrids:
            single.optimizer = hybrid
    for _, hybrid in hybrids:
        _copy_to_inner(hybrid)
    _refresh_masters(optimizer)


@torch.no_grad()
def _refresh_masters(optimizer: MegatronOptimizer) -> None:
    """The main parameters that Transformer Engine's Adam holds, which Megatron does not refresh."""
    for single in filter(is_precise, getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = single.optimizer
        for param in (param for group in inner.param_groups for param in group["params"]):
            if MASTER in inner.state.get(param, {}):
                inner.set_scaled_state(param, MASTER, param.detach().float())


def is_precise(single: MegatronOptimizer) -> bool:
    """Whether the main parameters of one of Megatron's optimizers are held by Transformer Engine's Adam."""
    return getattr(single.config, _PRECISION_AWARE) and hasattr(single.optimizer, "set_scaled_state")


def begin_precise(optimizer: Upstream, *_: object) -> None:
    """Makes the state of Transformer Engine's Adam; Megatron's own way lacks an argument that it has had since 2.1."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.initialize_state(param, store_param_remainders=False)


def _hybrids(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The Megatron optimizers of this rank whose inner one is hybrid."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    singles = getattr(optimizer, "chained_optimizers", [optimizer])
    return [single for single in singles if isinstance(single.optimizer, HybridDeviceOptimizer)]


def _held(single: MegatronOptimizer, hybrid: HybridOptimizer) -> dict[Tensor, Tensor]:
    """What Megatron expects in the groups instead of each of the hybrid's parameters.

    The distributed optimizer loads main parameters into its groups; the others look up the weights in theirs, and load
    main parameters beside them.
    """
    inner: dict[Tensor, Tensor] = hybrid.param_to_inner_param
    return inner if hasattr(single, "buffers") else {param: param for param in inner}


def _plain(hybrid: HybridOptimizer, held: dict[Tensor, Tensor]) -> torch.optim.Optimizer:
    """An Adam over what is ``held``, in the order of the hybrid's groups, that shares its state."""
    from mca_models.megatron.platform import FusedAdam

    step = _step(hybrid)
    groups = [
        group | {"params": [held[param] for param in group["params"]], **({"step": step} if step else {})}
        for group in hybrid.param_groups
    ]
    plain = FusedAdam(groups)
    states = {param: state for single in hybrid.sub_optimizers for param, state in single.state.items()}
    for param, inner in hybrid.param_to_inner_param.items():
        state = states.get(inner) or {name: torch.zeros_like(inner, requires_grad=False) for name in _MOMENTS}
        plain.state[held[param]] = {name: state[name] for name in _MOMENTS}
    return plain


def _step(hybrid: HybridOptimizer) -> int:
    """Of the parts on the host it is each parameter's, of that on the device its groups'."""
    steps = [group.get("step", 0) for single in hybrid.sub_optimizers for group in single.param_groups]
    steps += [state.get("step", 0) for single in hybrid.sub_optimizers for state in single.state.values()]
    return int(max(steps, default=0))


@torch.no_grad()
def _take(hybrid: HybridOptimizer, plain: torch.optim.Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Gives the hybrid what was loaded into ``plain`` and into what it ``held``."""
    for param, inner in hybrid.param_to_inner_param.items():
        if held[param] is inner:
            param.data.copy_(inner)
        else:
            inner.data.copy_(param)
    step = max((group.get("step", 0) for group in plain.param_groups), default=0)
    for single in hybrid.sub_optimizers:
        of_each_parameter = isinstance(single, torch.optim.AdamW)
        for group in single.param_groups:
            if not of_each_parameter:
                group["step"] = step
            for inner in group["params"]:
                loaded = plain.state[held[hybrid.inner_param_to_orig_param[inner]]]
                single.state[inner] = {name: loaded[name].to(inner.device) for name in _MOMENTS}
                if of_each_parameter:
                    single.state[inner]["step"] = torch.tensor(float(step))
    hybrid._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def _copy_to_inner(hybrid: HybridOptimizer) -> None:
    """The copies of parameters that have changed since they were made."""
    for param, inner in hybrid.param_to_inner_param.items():
        if inner is not param:
            inner.data.copy_(param)
