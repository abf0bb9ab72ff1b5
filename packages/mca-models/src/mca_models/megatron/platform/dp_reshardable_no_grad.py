"""Load data-parallel-reshardable optimizer state without gradients.

``DistributedOptimizer.load_parameter_state_from_dp_reshardable`` copies into fp32 main parameters that are views of
leaves which require grad; outside ``no_grad`` PyTorch raises an error ("a view of a leaf Variable ...").
"""

import inspect

import torch

from mca_models.megatron.platform._patch import EVERYWHERE, Patch

_NAME = "load_parameter_state_from_dp_reshardable"


def _needed() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    method = getattr(DistributedOptimizer, _NAME)
    return "no_grad" not in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    setattr(DistributedOptimizer, _NAME, torch.no_grad()(getattr(DistributedOptimizer, _NAME)))


PATCH = Patch(
    name="dp-reshardable-no-grad",
    why="loading fp32 optimizer state (dp_reshardable) copies into views of leaves that require grad",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
