"""Split parameters between device and host for optimizer offloading if the device is the CPU.

``HybridDeviceOptimizer`` uses ``is_cuda`` to tell a parameter from its copy in host memory. Without CUDA every
parameter looks like such a copy: nothing is offloaded for any fraction, and the first step raises ``KeyError``. While
it splits them, results of ``.cpu()``, and tensors made from them, count as host tensors here, all others as device
tensors.
"""

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream

_NAME = "_get_sub_optimizer_param_groups"
_IS_CUDA: Upstream = torch.Tensor.is_cuda
_CPU: Upstream = torch.Tensor.cpu


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


def _needed() -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    method = getattr(HybridDeviceOptimizer, _NAME)
    return ".is_cuda" in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    divide = getattr(HybridDeviceOptimizer, _NAME)

    @functools.wraps(divide)
    def with_host_copies(*args: object) -> Upstream:
        with HostCopies():
            return divide(*args)

    setattr(HybridDeviceOptimizer, _NAME, with_host_copies)


PATCH = Patch(
    name="hybrid-split",
    why="optimizer offloading distinguishes parameters from their copies in host memory by is_cuda",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_needed,
    apply=_apply,
)
