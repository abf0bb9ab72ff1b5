"""Accept the distributed optimizer's shards of fp32 parameters in optimizer offloading.

They are views of the parameters, hence no leaves of the graph, and ``torch.optim.Optimizer`` rejects them ("can't
optimize a non-leaf Tensor"). Other optimizers are not affected, because their groups are replaced after construction,
but ``HybridDeviceOptimizer`` is constructed again. A view that retains its gradient is accepted.
"""

import torch

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Settings, Upstream


def _needed() -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return "add_param_group" not in vars(HybridDeviceOptimizer)


def _apply() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def add_param_group(self: Upstream, param_group: Settings) -> None:
        for param in param_group["params"]:
            if not param.is_leaf:
                param.retain_grad()
        torch.optim.Optimizer.add_param_group(self, param_group)

    HybridDeviceOptimizer.add_param_group = add_param_group


PATCH = Patch(
    name="hybrid-views",
    why="optimizer offloading with the distributed optimizer refuses fp32 parameters",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
