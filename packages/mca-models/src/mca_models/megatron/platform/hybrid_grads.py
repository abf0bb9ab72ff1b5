"""Train fp32 parameters that stay on the device with optimizer offloading and a precision-aware optimizer.

Their gradients are in ``decoupled_grad`` then. ``HybridDeviceOptimizer`` copies these to its copies, on the host and in
fp32, but not to parameters that need no copy, which would silently never change.
"""

import functools
import inspect

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_set_sub_optimizer_grads"


def _needed() -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    method = getattr(HybridDeviceOptimizer, _NAME)
    return "param.grad = " in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    set_grads = getattr(HybridDeviceOptimizer, _NAME)

    @functools.wraps(set_grads)
    def set_all_grads(self: Upstream) -> None:
        set_grads(self)
        for param, inner in self.param_to_inner_param.items():
            if inner is param and hasattr(param, "decoupled_grad"):
                param.grad = param.decoupled_grad

    setattr(HybridDeviceOptimizer, _NAME, set_all_grads)


PATCH = Patch(
    name="hybrid-grads",
    why="optimizer offloading with a precision-aware optimizer forgets fp32 parameters that stay on the device",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
