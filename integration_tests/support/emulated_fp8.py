"""Products in fp8 on ranks without a GPU: recipes, scales, histories and reductions are Transformer Engine's.

Emulated is the rounding of a tensor to fp8 and the product of what was rounded. Scales of a whole tensor are those that
its quantizer keeps or finds; those of blocks follow the quantizer's block, along the dimension that a product adds up.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

_OF_TENSORS = ("Float8Quantizer", "Float8CurrentScalingQuantizer")
_OF_BLOCKS = ("MXFP8Quantizer", "Float8BlockQuantizer")


def install() -> dict[str, Callable[..., None]]:
    """Prepares this process; returns the kernels that are to be exchanged, by name."""
    from mca_models.megatron.factory import limits

    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # scales are computed in Python
    torch.cuda.is_current_stream_capturing = lambda: False
    limits._CUDA_ONLY = tuple(name for name in limits._CUDA_ONLY if name != "fp8")
    return {"fused_multi_row_padding": _padded, "fused_multi_row_unpadding": _unpadded}


@contextmanager
def forward_of(module: Any, inp: Tensor, gemms: int = 1) -> Iterator[None]:
    """The block in which Transformer Engine's ``module`` computes, with the checks and scales of its own."""
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        module.prepare_forward(inp, num_gemms=gemms)
    try:
        yield
    finally:
        module.end_forward()


def product(module: Any, x: Tensor, weight: Tensor, gemm: int = 0, *, first: bool = False) -> Tensor:
    """``x @ weight.T``, in fp8 where the module computes in it.

    Args:
        module: Transformer Engine's.
        x: ``[..., in]``.
        weight: ``[out, in]``.
        gemm: Which of the module's products.
        first: After its backward pass all modules' scales of gradients change.
    """
    if not module.fp8:
        return functional.linear(x, weight.to(x.dtype))
    made: Tensor = _Product.apply(x, weight, module, gemm, first)
    return made


def is_first() -> bool:
    """Return True for the first request of a module in this forward pass: once for each call of a module."""
    from transformer_engine.pytorch.module.linear import _check_fp8_reduce_and_update

    return bool(_check_fp8_reduce_and_update())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any, gemm: int, first: bool) -> Tensor:
        from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

        rows = x.reshape(-1, x.shape[-1])
        assert_dim_for_fp8_exec(rows, weight)
        assert len(rows) % 16 == 0 and weight.shape[0] % 16 == 0, f"{len(rows)} tokens, {tuple(weight.shape)}"
        scaled = module.quantizers["scaling_fwd"]
        of_rows, of_weight = scaled[3 * gemm], scaled[3 * gemm + 1]
        along, kept = _rounded(rows, of_rows), _rounded(weight, of_weight).to(x.dtype)
        # what the backward pass adds up lies across
        across = (_across(rows, of_rows, along), _across(weight, of_weight, kept).to(x.dtype))
        ctx.save_for_backward(*across)
        ctx.module, ctx.gemm, ctx.first = module, gemm, first
        return functional.linear(along, kept).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        rows, weight = ctx.saved_tensors
        flat, quantizer = (
            grad.reshape(-1, grad.shape[-1]),
            ctx.module.quantizers["scaling_bwd"][2 * ctx.gemm],
        )
        over = _rounded(flat, quantizer)
        of_input = (over @ weight).reshape(*grad.shape[:-1], -1)
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return of_input, _across(flat, quantizer, over).mT @ rows, None, None, None


def _rounded(x: Tensor, quantizer: Any, block: tuple[int, int] | None = None) -> Tensor:
    """``x`` as it is after a way to fp8 and back; a quantizer of delayed scaling is reported its largest value.

    Args:
        x: ``[rows, columns]``.
        quantizer: Transformer Engine's.
        block: What has a scale of its own, if the tensor has not one; by default along a row.
    """
    from transformer_engine.pytorch.constants import DType

    dtype = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}[quantizer.dtype]
    most, exact = torch.finfo(dtype).max, x.detach().float()
    kind = type(quantizer).__name__
    assert kind in (*_OF_TENSORS, *_OF_BLOCKS), f"{kind} is not emulated"
    if kind in _OF_BLOCKS:
        assert kind != "MXFP8Quantizer" or quantizer.is_quantizable(x), f"{tuple(x.shape)} for {kind}"
        largest = _largest(exact, block or _block(quantizer)).clamp(
            min=getattr(quantizer, "amax_epsilon", 0.0)
        )
        scale = torch.exp2(-torch.log2(largest / most).ceil())  # a power of two that lets nothing overflow
        scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    elif kind == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, exact.abs().max().reshape(1)))
        scale = quantizer.scale
    else:
        largest = exact.abs().max().reshape(1)
        scale = torch.where(largest > 0, most / largest, torch.ones_like(largest))
    return ((exact * scale).clamp(-most, most).to(dtype).float() / scale).to(x.dtype)


def _across(x: Tensor, quantizer: Any, along: Tensor) -> Tensor:
    """`_rounded` where a product adds up the rows of ``x``; ``along`` where that is the same."""
    block = _block(quantizer) if type(quantizer).__name__ in _OF_BLOCKS else None
    return along if block is None or block[0] == block[1] else _rounded(x, quantizer, (block[1], block[0]))


def _block(quantizer: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, along a row where they lie in one."""
    if type(quantizer).__name__ == "MXFP8Quantizer":
        assert not quantizer.with_2d_quantization
        return 1, 32
    assert quantizer.force_pow_2_scales
    return (1 if quantizer.block_scaling_dim == 1 else quantizer.block_len), quantizer.block_len


def _largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest value of each element's block; the last ones may be smaller."""
    rows, columns = x.shape
    whole = functional.pad(x.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    of_blocks = whole.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))
    return of_blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def _padded(rows: Tensor, out: Tensor, lengths: list[int], padded: list[int]) -> None:
    out.zero_()
    for ours, theirs, length in zip(rows.split(lengths), out.split(padded), lengths, strict=True):
        theirs[:length] = ours


def _unpadded(rows: Tensor, out: Tensor, padded: list[int], lengths: list[int]) -> None:
    for ours, theirs, length in zip(rows.split(padded), out.split(lengths), lengths, strict=True):
        theirs.copy_(ours[:length])
