"""Patches of Megatron's optimizers and of their saved state."""

import functools
import inspect

import torch

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.platform.fused_adam import FusedAdam
from mca_models.megatron.types import Upstream


def _distributed_adam_needed() -> bool:
    import megatron.core.optimizer as optimizer

    return bool(optimizer.USING_PYTORCH_OPTIMIZER)


def _apply_distributed_adam() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


DISTRIBUTED_ADAM = Patch(
    name="distributed-adam",
    why="the distributed optimizer cannot resume with torch.optim.AdamW",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_distributed_adam_needed,
    apply=_apply_distributed_adam,
)
"""Use mca's ``FusedAdam`` in Megatron's optimizers if neither Transformer Engine nor Apex is installed.

With ``torch.optim.AdamW`` the distributed optimizer cannot resume: ``state_dict()`` asserts that a step was made,
loading raises KeyError 'step', and ``load_state_dict`` lets all parameters share one step tensor, so that with three
parameters step 5 becomes 8 after one update (a silently wrong bias correction).
"""


def _plain_sgd_needed() -> bool:
    import megatron.core.optimizer as optimizer

    return "import FusedSGD as SGD" in inspect.getsource(optimizer)


def _apply_plain_sgd() -> None:
    import megatron.core.optimizer as optimizer
    from torch.optim import SGD

    optimizer.SGD = SGD


PLAIN_SGD = Patch(
    name="plain-sgd",
    why="sgd of Transformer Engine and of Apex keeps a momentum that is 0, and fails where a group is empty",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_plain_sgd_needed,
    apply=_apply_plain_sgd,
)
"""Use torch's SGD even if Transformer Engine or Apex is installed, whose SGD Megatron would use.

Theirs allocates a momentum buffer for every parameter also without momentum: 4 bytes each that are never read, and
that a checkpoint has and a new optimizer does not expect. They also read their device from the first parameter of the
first group, which may be empty on a rank (IndexError), because Megatron makes the same groups on all ranks.
"""


_RATES = ("max_lr", "min_lr")


def _parameter_groups_needed() -> bool:
    from megatron.core.optimizer import distrib_optimizer, optimizer

    known = (optimizer.param_group_identifier_keys, distrib_optimizer.param_group_identifier_keys)
    return not all(name in keys for keys in known for name in _RATES)


def _apply_parameter_groups() -> None:
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = optimizer.param_group_identifier_keys
    both = (*keys, *(name for name in _RATES if name not in keys))
    optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = both


PARAMETER_GROUPS = Patch(
    name="parameter-groups",
    why="a state whose groups differ in their learning rate alone is loaded into the wrong ones, or not at all",
    megatron=">=0.16.1,<0.19",
    devices=EVERYWHERE,
    needed=_parameter_groups_needed,
    apply=_apply_parameter_groups,
)
"""Keep parameter groups that differ only in learning rate separate when optimizer state is loaded.

Megatron identifies the groups of a saved state by some of their keys, but not by ``max_lr`` and ``min_lr``. With
``decoupled_lr`` two groups then count as one: the non-distributed optimizer raises ("a parameter group that doesn't
match the size of optimizer's group"), and the distributed one silently continues with one group's rate for both.
"""


_MAKE = "_get_megatron_optimizer_based_on_param_groups"


def _expert_norm_needed() -> bool:
    from megatron.core import optimizer, tensor_parallel

    known = inspect.signature(tensor_parallel.param_is_not_tensor_parallel_duplicate).parameters
    return "expert_tp_group" not in known and not hasattr(getattr(optimizer, _MAKE), "__wrapped__")


def _apply_expert_norm() -> None:
    from megatron.core import optimizer, parallel_state

    make = getattr(optimizer, _MAKE)

    @functools.wraps(make)
    def with_expert_tp_group(*args: object, **kwargs: Upstream) -> Upstream:
        made = make(*args, **kwargs)
        if any(group["is_expert_parallel"] for group in kwargs["param_groups"]):
            made.tp_group = parallel_state.get_expert_tensor_parallel_group()
        return made

    setattr(optimizer, _MAKE, with_expert_tp_group)


EXPERT_NORM = Patch(
    name="expert-norm",
    why="the optimizer of experts identifies copies of a parameter by the dense tensor group",
    megatron=">=0.16.1,<0.19",
    devices=EVERYWHERE,
    needed=_expert_norm_needed,
    apply=_apply_expert_norm,
)
"""Count replicated parameters of experts once in the gradient norm.

Of replicated parameters, the norm, and with it clipping, counts the copy on the first rank of the optimizer's
``tp_group``. megatron-core 0.16 gives the experts' optimizer the dense parameters' group: parameters that all ranks
of an expert have (an adapter's factors) are counted on each of them, or not at all, if the two groups differ.
"""


def _optimizer_te_version_needed() -> bool:
    from megatron.core.optimizer import optimizer_config
    from megatron.core.utils import get_te_version

    return get_te_version() is None and optimizer_config.is_te_min_version is not _is_none


def _is_none(version: str, check_equality: bool = True) -> bool:
    return False


def _apply_optimizer_te_version() -> None:
    from megatron.core.optimizer import optimizer_config

    optimizer_config.is_te_min_version = _is_none


OPTIMIZER_TE_VERSION = Patch(
    name="optimizer-te-version",
    why="a precision-aware optimizer compares the version of Transformer Engine, None without it, with a number",
    megatron=">=0.16.1,<0.17",
    devices=EVERYWHERE,
    needed=_optimizer_te_version_needed,
    apply=_apply_optimizer_te_version,
)
"""Support the precision-aware optimizer of optimizer offloading without Transformer Engine.

``OptimizerConfig`` compares Transformer Engine's version, ``None``, with a number (TypeError). Later versions of
megatron-core treat it as 0.0.0.
"""


_LOAD = "load_parameter_state_from_dp_reshardable"


def _dp_reshardable_no_grad_needed() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    method = getattr(DistributedOptimizer, _LOAD)
    return "no_grad" not in inspect.getsource(method) and not hasattr(method, "__wrapped__")


def _apply_dp_reshardable_no_grad() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    setattr(DistributedOptimizer, _LOAD, torch.no_grad()(getattr(DistributedOptimizer, _LOAD)))


DP_RESHARDABLE_NO_GRAD = Patch(
    name="dp-reshardable-no-grad",
    why="loading fp32 optimizer state (dp_reshardable) copies into views of leaves that require grad",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_dp_reshardable_no_grad_needed,
    apply=_apply_dp_reshardable_no_grad,
)
"""Load data-parallel-reshardable optimizer state without gradients.

``DistributedOptimizer.load_parameter_state_from_dp_reshardable`` copies into fp32 main parameters that are views of
leaves which require grad; outside ``no_grad`` PyTorch raises an error ("a view of a leaf Variable ...").
"""
