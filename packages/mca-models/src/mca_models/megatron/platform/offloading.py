"""Patches of optimizer offloading, Megatron's ``HybridDeviceOptimizer``."""

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

from mca_models.megatron.platform._patch import CPU, EVERYWHERE, Patch
from mca_models.megatron.types import Settings, Upstream

_SPLIT = "_get_sub_optimizer_param_groups"
_IS_CUDA: Upstream = torch.Tensor.is_cuda
_CPU: Upstream = torch.Tensor.cpu


def _optimizer() -> Upstream:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return HybridDeviceOptimizer


class HostCopies(TorchFunctionMode):
    """Function mode that distinguishes copies in host memory from tensors of a CPU device."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Upstream],
        types: Iterable[type],
        args: Upstream = (),
        kwargs: Upstream = None,
    ) -> Upstream:
        """Call ``func``; answer ``is_cuda`` itself."""
        copied = any(id(value) in self._copies for value in args)
        if func == _IS_CUDA.__get__:
            return not copied
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (copied or func is _CPU):
            self._copies[id(result)] = result
        return result


def _hybrid_split_needed() -> bool:
    method = getattr(_optimizer(), _SPLIT)
    return ".is_cuda" in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply_hybrid_split() -> None:
    divide = getattr(_optimizer(), _SPLIT)

    @functools.wraps(divide)
    def with_host_copies(*args: object) -> Upstream:
        with HostCopies():
            return divide(*args)

    setattr(_optimizer(), _SPLIT, with_host_copies)


HYBRID_SPLIT = Patch(
    name="hybrid-split",
    why="optimizer offloading distinguishes parameters from their copies in host memory by is_cuda",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_hybrid_split_needed,
    apply=_apply_hybrid_split,
)
"""Split parameters between device and host for optimizer offloading if the device is the CPU.

``HybridDeviceOptimizer`` uses ``is_cuda`` to tell a parameter from its copy in host memory. Without CUDA every
parameter looks like such a copy: nothing is offloaded for any fraction, and the first step raises ``KeyError``. While
it splits them, results of ``.cpu()``, and tensors made from them, count as host tensors here, all others as device
tensors.
"""


def _hybrid_views_needed() -> bool:
    return "add_param_group" not in vars(_optimizer())


def _apply_hybrid_views() -> None:
    def add_param_group(self: Upstream, param_group: Settings) -> None:
        for param in param_group["params"]:
            if not param.is_leaf:
                param.retain_grad()
        torch.optim.Optimizer.add_param_group(self, param_group)

    _optimizer().add_param_group = add_param_group


HYBRID_VIEWS = Patch(
    name="hybrid-views",
    why="optimizer offloading with the distributed optimizer refuses fp32 parameters",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_hybrid_views_needed,
    apply=_apply_hybrid_views,
)
"""Accept the distributed optimizer's shards of fp32 parameters in optimizer offloading.

They are views of the parameters, hence no leaves of the graph, and ``torch.optim.Optimizer`` rejects them ("can't
optimize a non-leaf Tensor"). Other optimizers are not affected, because their groups are replaced after construction,
but ``HybridDeviceOptimizer`` is constructed again. A view that retains its gradient is accepted.
"""


_SET_GRADS = "_set_sub_optimizer_grads"


def _hybrid_grads_needed() -> bool:
    method = getattr(_optimizer(), _SET_GRADS)
    return "param.grad = " in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply_hybrid_grads() -> None:
    set_grads = getattr(_optimizer(), _SET_GRADS)

    @functools.wraps(set_grads)
    def set_all_grads(self: Upstream) -> None:
        set_grads(self)
        for param, inner in self.param_to_inner_param.items():
            if inner is param and hasattr(param, "decoupled_grad"):
                param.grad = param.decoupled_grad

    setattr(_optimizer(), _SET_GRADS, set_all_grads)


HYBRID_GRADS = Patch(
    name="hybrid-grads",
    why="optimizer offloading with a precision-aware optimizer forgets fp32 parameters that stay on the device",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_hybrid_grads_needed,
    apply=_apply_hybrid_grads,
)
"""Train fp32 parameters that stay on the device with optimizer offloading and a precision-aware optimizer.

Their gradients are in ``decoupled_grad`` then. ``HybridDeviceOptimizer`` copies these to its copies, on the host and in
fp32, but not to parameters that need no copy, which would silently never change.
"""


_COPY_BACK = "_register_param_copy_back_gpu_hook"


def _hybrid_wait_needed() -> bool:
    waits = "wait_stream(self._d2h_stream)" in inspect.getsource(_optimizer().step)
    return not waits and not hasattr(getattr(_optimizer(), _COPY_BACK), "__wrapped__")


def _apply_hybrid_wait() -> None:
    register = getattr(_optimizer(), _COPY_BACK)

    @functools.wraps(register)
    def with_wait(self: Upstream) -> None:
        register(self)
        if self.param_update_in_fp32 and self.gpu_optimizer is not None:

            def wait(*_: object) -> None:
                torch.cuda.current_stream().wait_stream(self._d2h_stream)

            self.gpu_optimizer.register_step_pre_hook(wait)

    setattr(_optimizer(), _COPY_BACK, with_wait)


HYBRID_WAIT = Patch(
    name="hybrid-wait",
    why="optimizer offloading with overlap steps on the device before its gradients in fp32 are written",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_hybrid_wait_needed,
    apply=_apply_hybrid_wait,
)
"""Let the device's Adam wait for its fp32 gradients in optimizer offloading with overlap.

With a precision-aware optimizer ``HybridDeviceOptimizer`` makes them on the stream of its copies to the host and
steps on the current stream without a wait: Adam would read memory that is not written yet.
"""
