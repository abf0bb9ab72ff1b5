"""Recompute MLPs with biases alone.

Megatron's MLP returns its bias with its output, and that is the parameter itself. ``CheckpointFunction`` returns it,
so autograd takes the function's own backward pass for the origin of the parameter: it recurses endlessly, and a
frozen bias requires a gradient. A copy leaves the function instead.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

Outputs = Tensor | tuple[Tensor | None, ...]


def _function() -> Upstream:
    from megatron.core.tensor_parallel.random import CheckpointFunction

    return CheckpointFunction


def _needed() -> bool:
    return not hasattr(_function().forward, "__wrapped__")


def _without_parameters(run: Callable[..., Outputs]) -> Callable[..., Outputs]:
    def copied(*args: object) -> Outputs:
        outputs = run(*args)
        if isinstance(outputs, tuple):
            return tuple(out.clone() if isinstance(out, Parameter) else out for out in outputs)
        return outputs

    return copied


def _apply() -> None:
    function = _function()
    forward = function.forward

    @functools.wraps(forward)
    def forward_with_copies(context: Upstream, run: Callable[..., Outputs], *args: object) -> Outputs:
        outputs: Outputs = forward(context, _without_parameters(run), *args)
        return outputs

    function.forward = staticmethod(forward_with_copies)


PATCH = Patch(
    name="recomputed-bias",
    why="the backward pass of a recomputed MLP with a bias recurses endlessly",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
