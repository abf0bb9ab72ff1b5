"""Return the fused cross entropy's gradients in the dtype of its logits.

Megatron's kernel always rounds them to bfloat16: with fp32 or fp16 weights every gradient of the model is off by 4e-3
of its size.
"""

import functools
import inspect

import torch
from torch import Tensor

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _module() -> Upstream:
    from megatron.core.fusions import fused_cross_entropy

    return fused_cross_entropy


def _needed() -> bool:
    module = _module()
    rounds = "grad_input.to(torch.bfloat16)" in inspect.getsource(module)
    return rounds and not hasattr(module._VocabParallelCrossEntropy.backward, "__wrapped__")


def _apply() -> None:
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Plain

    kernel: Upstream = _module()._VocabParallelCrossEntropy
    forward, backward = kernel.forward, kernel.backward

    @functools.wraps(forward)
    def with_dtype(ctx: Upstream, logits: Tensor, *rest: object) -> Upstream:
        ctx.logits_dtype = logits.dtype
        return forward(ctx, logits, *rest)

    @functools.wraps(backward)
    def exact(ctx: Upstream, gradient: Tensor) -> Upstream:
        if ctx.logits_dtype == torch.bfloat16:
            return backward(ctx, gradient)
        softmax, mask, target = ctx.saved_tensors
        rows, numbers, update, made = Plain.prepare_gradient_calculation_operands(softmax, mask)
        made = Plain.calculate_gradients(rows, numbers, target, update, made, gradient)
        return made.to(ctx.logits_dtype), None, None

    kernel.forward, kernel.backward = staticmethod(with_dtype), staticmethod(exact)


PATCH = Patch(
    name="cross-entropy-dtype",
    why="the fused cross entropy rounds gradients of fp32 and fp16 logits to bfloat16",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
