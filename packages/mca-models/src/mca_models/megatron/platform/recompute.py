"""Patches of activation recomputation."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _recompute_without_te_needed() -> bool:
    from megatron.core.tensor_parallel import random

    return not hasattr(random, "FP8GlobalStateManager") and random.CheckpointWithoutOutput().fp8


def _apply_recompute_without_te() -> None:
    from megatron.core.tensor_parallel import random

    made = random.CheckpointWithoutOutput.__init__

    @functools.wraps(made)
    def with_or_without(self: Upstream, fp8: Upstream = None, *args: object, **options: object) -> None:
        made(self, fp8 or None, *args, **options)

    random.CheckpointWithoutOutput.__init__ = with_or_without


RECOMPUTE_WITHOUT_TE = Patch(
    name="recompute-without-te",
    why="recomputing a norm raises NameError without Transformer Engine",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_recompute_without_te_needed,
    apply=_apply_recompute_without_te,
)
"""Recompute modules whose output is discarded without Transformer Engine.

``CheckpointWithoutOutput(fp8=False)`` treats False as fp8 (it tests ``is not None``) and then uses names of Transformer
Engine: ``recompute_modules`` with layernorm raises ``NameError: FP8GlobalStateManager``.
"""


Outputs = Tensor | tuple[Tensor | None, ...]


def _function() -> Upstream:
    from megatron.core.tensor_parallel.random import CheckpointFunction

    return CheckpointFunction


def _recomputed_bias_needed() -> bool:
    return not hasattr(_function().forward, "__wrapped__")


def _without_parameters(run: Callable[..., Outputs]) -> Callable[..., Outputs]:
    def copied(*args: object) -> Outputs:
        outputs = run(*args)
        if isinstance(outputs, tuple):
            return tuple(out.clone() if isinstance(out, Parameter) else out for out in outputs)
        return outputs

    return copied


def _apply_recomputed_bias() -> None:
    function = _function()
    forward = function.forward

    @functools.wraps(forward)
    def forward_with_copies(context: Upstream, run: Callable[..., Outputs], *args: object) -> Outputs:
        outputs: Outputs = forward(context, _without_parameters(run), *args)
        return outputs

    function.forward = staticmethod(forward_with_copies)


RECOMPUTED_BIAS = Patch(
    name="recomputed-bias",
    why="the backward pass of a recomputed MLP with a bias recurses endlessly",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_recomputed_bias_needed,
    apply=_apply_recomputed_bias,
)
"""Recompute MLPs with biases alone.

Megatron's MLP returns its bias with its output, and that is the parameter itself. ``CheckpointFunction`` returns it,
so autograd takes the function's own backward pass for the origin of the parameter: it recurses endlessly, and a
frozen bias requires a gradient. A copy leaves the function instead.
"""


_FORWARD = "_checkpointed_forward"


def _block_padding_needed() -> bool:
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward = getattr(TransformerBlock, _FORWARD, None)  # since 0.18 there is none
    if forward is None or hasattr(forward, "__wrapped__"):
        return False
    return "attention_mask, context, context_mask, rotary_pos_emb\n" in inspect.getsource(forward)


def _apply_block_padding() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward = getattr(TransformerBlock, _FORWARD, None)
    if forward is None:
        return

    @functools.wraps(forward)
    def with_mask(self: Any, *args: Any, padding_mask: Any = None, **options: Any) -> Any:
        def pass_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"padding_mask": padding_mask}

        hooks = [layer.register_forward_pre_hook(pass_mask, with_kwargs=True) for layer in self.layers]
        try:
            return forward(self, *args, padding_mask=padding_mask, **options)
        finally:
            for hook in hooks:
                hook.remove()

    setattr(TransformerBlock, _FORWARD, with_mask)


BLOCK_PADDING = Patch(
    name="block-padding",
    why="layers that recompute_method block leaves out count padding",
    megatron=">=0.16.1,<0.18",
    devices=EVERYWHERE,
    needed=_block_padding_needed,
    apply=_apply_block_padding,
)
"""Pass the padding mask to layers that ``recompute_method: block`` does not recompute.

megatron-core 0.16 passes the mask only to layers that it recomputes: in the others the experts' losses and biases count
padding.
"""
