"""Count replicated parameters of experts once in the gradient norm.

Of replicated parameters, the norm, and with it clipping, counts the copy on the first rank of the optimizer's
``tp_group``. megatron-core 0.16 gives the experts' optimizer the dense parameters' group: parameters that all ranks
of an expert have (an adapter's factors) are counted on each of them, or not at all, if the two groups differ.
"""

import functools
import inspect

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_get_megatron_optimizer_based_on_param_groups"


def _needed() -> bool:
    from megatron.core import optimizer, tensor_parallel

    known = inspect.signature(tensor_parallel.param_is_not_tensor_parallel_duplicate).parameters
    return "expert_tp_group" not in known and not hasattr(getattr(optimizer, _NAME), "__wrapped__")


def _apply() -> None:
    from megatron.core import optimizer, parallel_state

    make = getattr(optimizer, _NAME)

    @functools.wraps(make)
    def with_expert_tp_group(*args: object, **kwargs: Upstream) -> Upstream:
        made = make(*args, **kwargs)
        if any(group["is_expert_parallel"] for group in kwargs["param_groups"]):
            made.tp_group = parallel_state.get_expert_tensor_parallel_group()
        return made

    setattr(optimizer, _NAME, with_expert_tp_group)


PATCH = Patch(
    name="expert-norm",
    why="the optimizer of experts identifies copies of a parameter by the dense tensor group",
    megatron=">=0.16.1,<0.19",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
