"""Let the device's Adam wait for its fp32 gradients in optimizer offloading with overlap.

With a precision-aware optimizer ``HybridDeviceOptimizer`` makes them on the stream of its copies to the host and
steps on the current stream without a wait: Adam would read memory that is not written yet.
"""

import functools
import inspect

import torch

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_register_param_copy_back_gpu_hook"


def _needed() -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    waits = "wait_stream(self._d2h_stream)" in inspect.getsource(HybridDeviceOptimizer.step)
    return not waits and not hasattr(getattr(HybridDeviceOptimizer, _NAME), "__wrapped__")


def _apply() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    register = getattr(HybridDeviceOptimizer, _NAME)

    @functools.wraps(register)
    def with_wait(self: Upstream) -> None:
        register(self)
        if self.param_update_in_fp32 and self.gpu_optimizer is not None:

            def wait(*_: object) -> None:
                torch.cuda.current_stream().wait_stream(self._d2h_stream)

            self.gpu_optimizer.register_step_pre_hook(wait)

    setattr(HybridDeviceOptimizer, _NAME, with_wait)


PATCH = Patch(
    name="hybrid-wait",
    why="optimizer offloading with overlap steps on the device before its gradients in fp32 are written",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
