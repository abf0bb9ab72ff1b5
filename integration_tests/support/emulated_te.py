"""The real Transformer Engine on ranks without a GPU: its own classes and parameters, its arithmetic in plain torch.

    from emulated_te import needs_te, run_emulated

    pytestmark = [pytest.mark.ranks, needs_te]

    def test_...: run_emulated(2, fn, ...)         # as harness.run_ranks; in fn, layers are Transformer Engine's

Constructors, names, marks, extra states and sharded keys are Transformer Engine's and Megatron's. Emulated are the
forward passes of linears and norms, fused rotary embeddings, rounding to fp8 (`emulated_fp8`), the kernels of
attention (`emulated_attention`) and of the optimizer; each accepts only what it computes. Nothing is changed in the
process that forks. Not emulated: dropout of attention.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import emulated_attention
import emulated_fp8
from emulated_fp8 import forward_of, is_first, product
from harness import run_ranks
from mca_models.megatron import platform

Result = TypeVar("Result")

_IS_THERE = importlib.util.find_spec("transformer_engine") is not None
if _IS_THERE:
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # read when it is imported
    # before Megatron, which is to see it here on a CPU too
    platform.BEFORE_IMPORT = tuple(patch for patch in platform.BEFORE_IMPORT if patch.name != "engine-on-cpu")

needs_te = pytest.mark.skipif(
    not _IS_THERE,
    reason="Transformer Engine is not there; run with PYTHONPATH=$(uv run tools/build_transformer_engine.py)",
)


def run_emulated(size: int, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
    """``harness.run_ranks`` with Transformer Engine emulated in every rank."""
    return run_ranks(size, _emulated, fn, *args, **kwargs)


def _emulated(fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    install()
    return fn(*args, **kwargs)


def install() -> None:
    """Puts plain torch in the place of kernels, in this process; Megatron is imported already."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from megatron.core.transformer.moe import moe_utils

    forwards = {
        te.Linear: _linear,
        te.LayerNormLinear: _layer_norm_linear,
        te.GroupedLinear: _grouped_linear,
        te.RMSNorm: _norm,
        te.LayerNorm: _norm,
    }
    for cls, forward in forwards.items():
        cls.forward = forward
    _build_without_gpu()
    moe_utils.te_general_gemm = None
    kernels: dict[str, Callable[..., Any]] = {
        "multi_tensor_l2norm": _l2norm,
        "multi_tensor_scale": _scale,
        "multi_tensor_scale_tensor": _scale,
        "multi_tensor_adam": _adam,
    }
    kernels |= emulated_fp8.install()
    replaced = {getattr(tex, name): kernel for name, kernel in kernels.items()}
    replaced |= emulated_attention.install() | _fused_ropes()
    replaced[te.distributed._get_cuda_rng_state] = lambda **_: torch.get_rng_state()
    replaced[te.distributed._set_cuda_rng_state] = lambda state, **_: torch.set_rng_state(state)
    _exchange({**replaced, te.utils.get_device_compute_capability: lambda: (9, 0)})  # an H100
    _choose_as_on_a_gpu()


def _fused_ropes() -> dict[Any, Callable[..., Tensor]]:
    """Return the functions that rotate in one kernel, which ignores the strides of angles and reads row by row."""
    from megatron.core.extensions import transformer_engine as of
    from megatron.core.models.common.embeddings import rope_utils

    def as_read(freqs: Tensor) -> Tensor:
        return freqs.as_strided(freqs.shape, torch.empty(freqs.shape).stride())

    def padded(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(t, as_read(freqs), rotary_interleaved=interleaved)

    def packed(
        t: Tensor,
        ends: Tensor,
        freqs: Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        interleaved: bool = False,  # megatron-core 0.19 says which
    ) -> Tensor:
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)
        return rope_utils._apply_rotary_pos_emb_thd(
            t, ends, as_read(freqs), rotary_interleaved=interleaved, cp_group=group
        )

    return {of.fused_apply_rotary_pos_emb: padded, of.fused_apply_rotary_pos_emb_thd: packed}


def _build_without_gpu() -> None:
    """Constructors of modules ask whether CUDA is there, and for nothing of it."""
    from transformer_engine.pytorch.module import base

    made = base.TransformerEngineBaseModule.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch("torch.cuda.is_available", return_value=True):
            made(self, *args, **kwargs)

    base.TransformerEngineBaseModule.__init__ = make


def _exchange(replaced: dict[Any, Any]) -> None:
    """Puts functions in the place of others wherever a module has imported them."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("megatron", "transformer_engine", "transformer_engine_torch"):
            for key, value in list(vars(module).items()):
                for old, new in replaced.items():
                    if value is old:
                        setattr(module, key, new)


def _choose_as_on_a_gpu() -> None:
    """Layers are Transformer Engine's unless ``transformer_impl`` says local."""
    from mca_models.megatron import virtual_models
    from mca_models.megatron.factory import transformer_config

    modules: list[Any] = [virtual_models, transformer_config]
    for module in modules:
        module.choose_implementation = lambda args: args.transformer_impl or "transformer_engine"


def _entered(self: Any, x: Tensor) -> Tensor:
    """Return the input of a column-parallel linear: all tokens, with the gradients of all ranks summed."""
    from megatron.core.tensor_parallel import mappings as of

    ways = of.gather_from_sequence_parallel_region, of.copy_to_tensor_model_parallel_region
    return _exchanged(self, x, "column", *ways)


def _left(self: Any, y: Tensor) -> Tensor:
    """Return the output of a row-parallel linear: the sum over ranks."""
    from megatron.core.tensor_parallel import mappings as of

    ways = of.reduce_scatter_to_sequence_parallel_region, of.reduce_from_tensor_model_parallel_region
    return _exchanged(self, y, "row", *ways)


def _exchanged(
    self: Any, x: Tensor, mode: str, along_sequence: Callable[..., Tensor], whole: Callable[..., Tensor]
) -> Tensor:
    if self.parallel_mode != mode or self.tp_size == 1:
        return x
    return (along_sequence if self.sequence_parallel else whole)(x, group=self.tp_group)


def _with_bias(self: Any, y: Tensor) -> Any:
    bias = self.bias.to(y.dtype) if self.use_bias else None
    if bias is not None and self.apply_bias:
        y = y + bias
    return (y, bias) if self.return_bias else y


def _linear(self: Any, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
    with forward_of(self, inp):
        return _with_bias(self, _left(self, _multiplied(self, _entered(self, inp))))


def _layer_norm_linear(self: Any, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
    with forward_of(self, inp):
        normal = _normal(self, inp, self.layer_norm_weight, getattr(self, "layer_norm_bias", None))
        y = _with_bias(self, _multiplied(self, _entered(self, normal)))
    if not self.return_layernorm_output:
        return y
    return (*y, normal) if isinstance(y, tuple) else (y, normal)


def _multiplied(self: Any, x: Tensor) -> Tensor:
    return product(self, x, self.weight, first=self.fp8 and torch.is_grad_enabled() and is_first())


def _norm(self: Any, inp: Tensor) -> Tensor:
    return _normal(self, inp, self.weight, getattr(self, "bias", None))


def _normal(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scale = weight.float() + (1 if self.zero_centered_gamma else 0)
    if bias is None:
        return functional.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)
    return functional.layer_norm(x.float(), scale.shape, scale, bias.float(), self.eps).to(x.dtype)


def _grouped_linear(self: Any, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
    rows = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
    assert len(rows) == self.num_gemms
    biases = [getattr(self, f"bias{i}").to(inp.dtype) if self.use_bias else None for i in range(len(rows))]
    with forward_of(self, inp, self.num_gemms):
        first = self.fp8 and torch.is_grad_enabled() and is_first()
        parts = [
            product(self, x, getattr(self, f"weight{i}"), i, first=first and i == 0)
            for i, x in enumerate(inp.reshape(-1, inp.shape[-1]).split(rows))
        ]
    if self.use_bias and self.apply_bias:
        parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
    y = torch.cat(parts)
    y = y.view(*inp.shape[:-1], y.shape[-1])
    return (y, biases) if self.return_bias else y


def _l2norm(chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool = False, *_: Any) -> Any:
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def _scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], factor: Any, *_: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * float(factor))


@torch.no_grad()
def _adam(
    chunk: int,
    noop: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
    *_: Any,
) -> None:
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    tensors: Iterable[tuple[Tensor, ...]] = zip(*lists, strict=True)
    for grad, param, average, square, *master in tensors:
        weight = master[0] if master else param
        g = grad.float() if decoupled else grad.float() + weight_decay * weight
        average.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        change = (average / corrections[0]) / ((square / corrections[1]).sqrt() + eps)
        if decoupled:
            change = change + weight_decay * weight.float()
        weight.copy_(weight.float() - lr * change)
        if master:
            param.copy_(weight)
