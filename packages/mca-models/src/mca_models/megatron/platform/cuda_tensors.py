"""Create tensors for the device "cuda" on the CPU; pinned memory is ordinary memory.

Megatron writes ``device="cuda"``, ``.cuda()`` and ``pin_memory=True`` literally, and its distributed optimizer sorts
parameters by ``Tensor.type()`` into "torch.cuda.FloatTensor" and so on. A ``TorchFunctionMode`` rewrites these for the
thread that called ``prepare()`` (and for processes forked from it).
"""

from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream

_CPU_DEVICE = torch.device("cpu")
_TO: Upstream = torch.Tensor.to
_TYPE: Upstream = torch.Tensor.type


def _on_cpu(value: Upstream) -> Upstream:
    if isinstance(value, torch.device):
        return _CPU_DEVICE if value.type == "cuda" else value
    return _CPU_DEVICE if isinstance(value, str) and value.startswith("cuda") else value


class CudaToCpu(TorchFunctionMode):
    """Function mode that replaces CUDA devices in the arguments of torch functions."""

    def __torch_function__(
        self,
        func: Callable[..., Upstream],
        types: Iterable[type],
        args: Upstream = (),
        kwargs: Upstream = None,
    ) -> Upstream:
        """Call ``func`` with CPU for CUDA."""
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is _TO:
            args = tuple(map(_on_cpu, args))
        result = func(*args, **kwargs)
        if func is _TYPE and len(args) == 1 and not kwargs:
            result = result.replace("torch.", "torch.cuda.", 1)
        return result


_modes: list[CudaToCpu] = []


def _apply() -> None:
    tensor: Upstream = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self
    tensor.pin_memory = lambda self, *a, **k: self
    mode: Upstream = CudaToCpu()
    mode.__enter__()
    _modes.append(mode)


PATCH = Patch(
    name="cuda-tensors",
    why="megatron-core creates tensors on the device 'cuda' by name",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply,
)
