"""The first step: what is there, how fast the machine is, and that each kind of module computes at all."""

import importlib.metadata
import os
import platform as system
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.gpu_kit.kit import Kit

PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine", "peft", "mca-train")
ROWS, WIDTH, HEADS = 64, 128, 4


def smoke(kit: Kit) -> None:
    """Versions, ceilings, the environment of Megatron, and single modules."""
    kit.figure("python", system.python_version())
    for name in PACKAGES:
        try:
            kit.figure(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            kit.figure(name, "not there")
    kit.figure(
        "device", torch.cuda.get_device_name() if kit.device == "cuda" else f"CPU ({system.machine()})"
    )
    _connections(kit)
    _ceilings(kit)
    _copies(kit)
    _collective(kit)
    _adam(kit)
    if kit.device == "cuda" and find_spec("transformer_engine") is not None:
        _engine(kit)


def _connections(kit: Kit) -> None:
    """Doubt 11: Megatron's variable must stand before CUDA has a context."""
    from mca_models.megatron import platform

    before = kit.device == "cuda" and torch.cuda.is_initialized()
    kit.holds("doubt 11: CUDA has not begun before the platform", not before)
    platform.set_device()
    ordered = kit.device == "cpu" or bool(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    kit.holds("doubt 11: CUDA_DEVICE_MAX_CONNECTIONS is set", ordered)
    platform.prepare()


def timed(kit: Kit, call: Callable[[], object], times: int) -> float:
    """Seconds of a call, of so many after one that does not count."""
    call()
    kit.synchronise()
    start = time.perf_counter()
    for _ in range(times):
        call()
    kit.synchronise()
    return (time.perf_counter() - start) / times


def _ceilings(kit: Kit) -> None:
    """Measure the limits of the device: a product of bf16 matrices, a copy."""
    size = 8192 if kit.device == "cuda" else 256
    matrix = torch.randn(size, size, device=kit.device, dtype=torch.bfloat16)
    kit.figure("bf16 TFLOP/s", 2 * size**3 / timed(kit, lambda: matrix @ matrix, 10) / 1e12)
    source = torch.empty(size * size * 16, dtype=torch.uint8, device=kit.device)
    target = torch.empty_like(source)
    kit.figure("copy TB/s", 2 * source.nbytes / timed(kit, lambda: target.copy_(source), 10) / 1e12)


def _copies(kit: Kit) -> None:
    """Batches travel from pinned memory while the host goes on."""
    rows = torch.arange(4096)
    pinned = rows.pin_memory() if kit.device == "cuda" else rows
    moved = pinned.to(kit.device, non_blocking=True)
    kit.holds("a copy from pinned memory is whole", torch.equal(moved.cpu(), rows))


def _collective(kit: Kit) -> None:
    """The groups of one rank stand, and sum."""
    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel

    parallel.start(ParallelLayout())
    values = torch.ones(3, device=kit.device)
    torch.distributed.all_reduce(values)
    kit.holds("a sum over one rank", values.tolist() == [1.0, 1.0, 1.0])
    kit.figure("backend", str(torch.distributed.get_backend()))


def _adam(kit: Kit) -> None:
    """Doubt 17: which Adam Megatron has here, and that it is torch's AdamW."""
    import megatron.core.optimizer as optimizer

    kit.figure("Adam", f"{optimizer.Adam.__module__}.{optimizer.Adam.__name__}")
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(5, 7, generator=generator).to(kit.device) for _ in range(64)]
    gradient = torch.randn(5, 7, generator=generator).to(kit.device)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    found = []
    for kind in (optimizer.Adam, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        stepper = kind(parameters, **settings)

        def step(parameters: list[Any] = parameters, stepper: Any = stepper) -> None:
            for parameter in parameters:
                parameter.grad = gradient.clone()
            stepper.step()

        seconds = timed(kit, step, 3)
        kit.figure(f"doubt 17: ms of a step of 64 parameters, {kind.__name__}", seconds * 1e3)
        found.append(torch.stack([parameter.detach() for parameter in parameters]))
    kit.check("Adam is torch's AdamW after four steps", float((found[0] - found[1]).abs().max()), 1e-5)


def _engine(kit: Kit) -> None:
    """Transformer Engine's modules, forward and backward, against plain torch in fp32."""
    import transformer_engine.pytorch as te

    made: dict[str, tuple[Any, Callable[[Any, Tensor], Tensor]]] = {
        "Linear": (
            te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16),
            lambda m, x: functional.linear(x, m.weight.float(), m.bias.float()),
        ),
        "LayerNormLinear": (
            te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", params_dtype=torch.bfloat16),
            lambda m, x: functional.linear(
                _rms(x, m.layer_norm_weight, m.eps), m.weight.float(), m.bias.float()
            ),
        ),
        "RMSNorm": (
            te.RMSNorm(WIDTH, dtype=torch.bfloat16),
            lambda m, x: _rms(x, m.weight, m.eps),
        ),
    }
    for name, (module, plain) in made.items():
        _compare(kit, f"te.{name}", module.to(kit.device), partial(plain, module))
    attention = te.DotProductAttention(HEADS, WIDTH // HEADS, attn_mask_type="causal", qkv_format="sbhd")
    _compare(kit, "te.DotProductAttention", lambda x: attention(*[_heads(x)] * 3), _plain_attention)
    experts = te.GroupedLinear(2, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16).to(kit.device)
    sizes = [ROWS // 4, ROWS - ROWS // 4]
    _compare(
        kit,
        "te.GroupedLinear",
        lambda x: experts(x, sizes),
        lambda x: torch.cat(
            [part @ getattr(experts, f"weight{n}").float().T for n, part in enumerate(x.split(sizes))]
        ),
    )


def _compare(
    kit: Kit, name: str, module: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> None:
    """Output and gradient of the input, in bf16 against fp32."""
    x = torch.randn(ROWS, WIDTH, device=kit.device, dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().float().requires_grad_()
    out, expected = module(x), plain(wide)
    weight = torch.randn_like(expected)
    out.float().mul(weight).sum().backward()
    expected.mul(weight).sum().backward()
    assert x.grad is not None and wide.grad is not None
    kit.check(f"{name}: output", relative(out.view_as(expected), expected), 2e-2)
    kit.check(f"{name}: gradient", relative(x.grad, wide.grad), 2e-2)


def relative(found: Tensor, expected: Tensor) -> float:
    """The error's norm for that of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _heads(x: Tensor) -> Tensor:
    return x.view(ROWS, 1, HEADS, WIDTH // HEADS)


def _plain_attention(x: Tensor) -> Tensor:
    q = _heads(x).permute(1, 2, 0, 3)
    out: Tensor = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return out.permute(2, 0, 1, 3).reshape(ROWS, WIDTH)
