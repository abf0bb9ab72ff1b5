"""Mamba 1 in place of attention (Mamba, Falcon Mamba, Jamba), in plain torch or by the kernel of mamba-ssm.

    x, z = in_proj(u)           x = silu(conv(x))           dt, B, C = x_proj(x), each normalized in some families
    S_t = exp(s_t A) S_(t-1) + s_t x_t B_t^T               s = softplus(dt_proj(dt))
    y = out_proj((S C + D x) silu(z))

Every channel has a state. Tensor ranks hold channels and sum ``x_proj`` over all of them; context parallelism gathers
the projected tokens. Plain torch computes chunk by chunk, each again in the backward pass, so that it saves the states
between chunks only.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, silu, softplus

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.delta_rule import CHUNK
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.kernels import Kernel, find_kernel
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    mixer_in_layers,
    separate_layer_states,
)
from mca_models.megatron.layers.sharded import ShardedModule, cut_parameter
from mca_models.megatron.types import MarkedParameter, MegatronConfig

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
_PARTS = ("scanned", "gate")
"""Parts of the input projection (x, z); no other layer has both names in ``torch_dist`` directories."""


def selective_scan(
    x: Tensor,
    step: Tensor,
    bias: Tensor,
    rate: Tensor,
    into: Tensor,
    read: Tensor,
    skip: Tensor,
    kernel: Kernel | None,
) -> Tensor:
    """Compute the outputs of all tokens from a zero state, with the skip connection D.

    Args:
        x: ``[b, s, d]``.
        step: ``[b, s, d]``, time steps without their bias, before softplus.
        bias: ``[d]``, fp32.
        rate: ``[d, n]``, fp32, below 0: decay rates of each channel's state (A above).
        into: ``[b, s, n]``, B.
        read: ``[b, s, n]``, C.
        skip: ``[d]``, fp32: D.
        kernel: ``selective_scan_fn``; None: plain torch.

    Returns:
        ``[b, s, d]`` in fp32.
    """
    if kernel is not None:
        x, step, into, read = (part.transpose(1, 2).contiguous() for part in (x, step, into, read))
        out = kernel(x, step, rate, into, read, D=skip, delta_bias=bias, delta_softplus=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).float()
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, step = x.to(dtype), softplus(step.to(dtype) + bias)
    out = _ChunkedScan.apply(x, step, rate, into.to(dtype), read.to(dtype))
    assert isinstance(out, Tensor)
    return out + skip * x


class _ChunkedScan(torch.autograd.Function):
    """``selective_scan`` without the skip connection, which saves one state for each chunk.

    The gradient of a state is that of its output and of the next state, so it is a scan from the last token to the
    first.
    """

    @staticmethod
    def forward(ctx: Typed, x: Tensor, step: Tensor, rate: Tensor, into: Tensor, read: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], *rate.shape, dtype=x.dtype, device=x.device)
        before, outputs = [], []
        for x_i, step_i, into_i, read_i in _split(x, step, into, read):
            before.append(state)
            decay = (step_i.unsqueeze(-1) * rate).exp()
            states = _scanned(decay, _added(step_i * x_i, into_i, decay[:, 0] * state))
            outputs.append((states @ read_i.unsqueeze(-1)).squeeze(-1))
            state = states[:, -1].clone()
        ctx.save_for_backward(x, step, rate, into, read, torch.stack(before))
        return torch.cat(outputs, 1)

    @staticmethod
    def backward(ctx: Typed, grad: Tensor) -> tuple[Tensor, ...]:
        x, step, rate, into, read, before = ctx.saved_tensors
        grad_rate, later = torch.zeros_like(rate), torch.zeros_like(before[0])
        found: list[tuple[Tensor, ...]] = []
        for parts, state in reversed(list(zip(_split(x, step, into, read, grad), before, strict=True))):
            x_i, step_i, into_i, read_i, grad_i = parts
            decay = (step_i.unsqueeze(-1) * rate).exp()
            states = _scanned(decay, _added(step_i * x_i, into_i, decay[:, 0] * state))
            grad_read = (grad_i.unsqueeze(-1) * states).sum(2)
            own = (grad_i.unsqueeze(-1) * read_i.unsqueeze(-2)).flip(1)
            own = torch.cat([own[:, :1] + later.unsqueeze(1), own[:, 1:]], 1)
            following = torch.cat([torch.ones_like(decay[:, :1]), decay[:, 1:].flip(1)], 1)
            grads = _scanned(following, own).flip(1)
            previous = torch.cat([state.unsqueeze(1), states[:, :-1]], 1)
            grad_log = grads * previous * decay  # of the log decay, which is step times rate
            grad_rate += (grad_log * step_i.unsqueeze(-1)).sum((0, 1))
            grad_added = (grads * into_i.unsqueeze(-2)).sum(-1)
            grad_into = (grads * (step_i * x_i).unsqueeze(-1)).sum(2)
            found.append(
                (grad_added * step_i, grad_added * x_i + (grad_log * rate).sum(-1), grad_into, grad_read)
            )
            later = decay[:, 0] * grads[:, 0]
        grad_x, grad_step, grad_into, grad_read = (
            torch.cat(each[::-1], 1) for each in zip(*found, strict=True)
        )
        return grad_x, grad_step, grad_rate, grad_into, grad_read


def _split(*parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(part.split(CHUNK, 1) for part in parts), strict=True)


def _added(scaled: Tensor, into: Tensor, first: Tensor) -> Tensor:
    """Return what each token adds to the states ``[b, t, d, n]``; the first one adds the decayed state before it."""
    added = scaled.unsqueeze(-1) * into.unsqueeze(-2)
    return torch.cat([added[:, :1] + first.unsqueeze(1), added[:, 1:]], 1)


def _scanned(decay: Tensor, added: Tensor) -> Tensor:
    """Return ``S_t = decay_t S_(t-1) + added_t`` for all tokens, in doublings of the tokens that each sum covers."""
    reach = 1
    while reach < added.shape[1]:
        added = torch.cat([added[:, :reach], added[:, reach:] + decay[:, reach:] * added[:, :-reach]], 1)
        decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
        reach *= 2
    return added


class SummedLinear(ShardedModule):
    """``x W^T`` whose columns tensor ranks share: the output is summed, and full on each rank."""

    axes: ClassVar = {"weight": 1}

    def __init__(self, columns: int, rows: int, config: MegatronConfig, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        weight: MarkedParameter = cut_parameter((rows, columns), config.params_dtype)
        weight.partition_dim = 1
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map this rank's channels ``[..., columns]`` to ``[..., rows]``; the bias is None."""
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        summed: Tensor = reduce_from_tensor_model_parallel_region(linear(x, self.weight), group=self.group)
        return summed, None


class ReplicatedNorm(ShardedModule):
    """RMSNorm of channels that each tensor rank has in full, as it has the gradient of the weight, if there is one."""

    def __init__(self, channels: int, model: McaModelConfig, config: MegatronConfig) -> None:
        super().__init__()
        sizes = given(model.selective_scan)
        self.eps = config.layernorm_epsilon if sizes.scan_norm_epsilon is None else sizes.scan_norm_epsilon
        weighted = sizes.scan_norm == "weighted"
        weight = torch.nn.Parameter(torch.ones(channels, dtype=config.params_dtype)) if weighted else None
        self.weight: torch.nn.Parameter | None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` in fp32; return its dtype."""
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return normal if self.weight is None else self.weight * normal


class StepProjection(ShardedModule):
    """Projection to the time steps of this rank's channels, and their bias."""

    axes: ClassVar = {"weight": 0, "bias": 0}

    def __init__(self, rank: int, channels: int, config: MegatronConfig) -> None:
        super().__init__()
        self.weight = cut_parameter((channels, rank), config.params_dtype)
        self.bias = cut_parameter((channels,), config.params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[..., rank]`` to ``[..., channels]`` without the bias; return the bias in fp32 too."""
        return linear(x, self.weight), self.bias.float()


class SelectiveScan(SequenceMixer):
    """Mamba 1 layer with one tensor rank's channels; `mixer_spec` mixes in ``MegatronModule``."""

    cut = ("A_log", "D", "conv1d.weight", "conv1d.bias")

    def __init__(
        self, config: MegatronConfig, model: McaModelConfig, column: Typed, row: Typed, **options: Typed
    ) -> None:
        super().__init__(config)
        self.groups, sizes = options["pg_collection"], given(model.selective_scan)
        self.channels = sizes.scan_channels // self.groups.tp.size()
        self.in_proj, self.out_proj = self._projections(
            column, row, rows=len(_PARTS) * sizes.scan_channels, inside=sizes.scan_channels
        )
        self.conv1d = CausalConvolution.build(
            self.channels, sizes.scan_conv_kernel_dim, config, bias=sizes.scan_conv_bias
        )
        self.scan = find_kernel("selective_scan_fn", config)
        self.widths = [sizes.scan_step_rank, sizes.scan_state_dim, sizes.scan_state_dim]
        self.x_proj = SummedLinear(self.channels, sum(self.widths), config, self.groups.tp)
        self.norms = _NORMS if sizes.scan_norm != "none" else ()
        for name, width in zip(self.norms, self.widths, strict=False):
            setattr(self, name, ReplicatedNorm(width, model, config))
        self.dt_proj = StepProjection(sizes.scan_step_rank, self.channels, config)
        self.A_log = cut_parameter((self.channels, sizes.scan_state_dim), config.params_dtype)
        self.D = cut_parameter((self.channels,), config.params_dtype)
        self.fused = {"in_proj.weight": ([self.channels] * len(_PARTS), _PARTS)}

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections ``[s, b, x z]`` of one sequence to gated values ``[s, b, channels]``."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        convolved, gate = mixed.chunk(len(_PARTS), -1)
        x = self.conv1d(convolved.permute(1, 2, 0)).transpose(1, 2)
        shared = self.x_proj(x)[0]
        if self.norms:
            parts = zip(self.norms, shared.split(self.widths, -1), strict=True)
            shared = torch.cat([getattr(self, norm)(part) for norm, part in parts], -1)
        # each rank reads what all have, for its own channels
        shared = copy_to_tensor_model_parallel_region(shared, group=self.groups.tp)
        step, into, read = shared.split(self.widths, -1)
        rate = -self.A_log.float().exp()
        step, bias = self.dt_proj(step)
        out = selective_scan(x, step, bias, rate, into, read, self.D.float(), self.scan)
        gated: Tensor = (out.transpose(0, 1) * silu(gate.float())).to(mixed.dtype)
        return gated


def _start(name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """Return initial values of Mamba's rates, 1 to the number of a state's channels, and skip connections."""
    if name.endswith("A_log"):
        return torch.arange(1, shape[-1] + 1).float().log().expand(shape).clone()
    return torch.ones(shape) if name.endswith(".D") else None


SELECTIVE_SCAN = Feature(
    name="selective scan",
    enabled=lambda config: config.selective_scan is not None,
    layer=mixer_in_layers("selective_scan", SelectiveScan),
    start=_start,
    settings=separate_layer_states,
)
