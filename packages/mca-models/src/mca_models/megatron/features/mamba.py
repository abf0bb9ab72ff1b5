"""Mamba 2 in place of attention, or parallel to it, in plain torch or by the kernel of mamba-ssm.

Megatron's forward pass needs CUDA kernels. Its parameters, their names and the parts of its distributed checkpoint are
unchanged. Tensor ranks hold groups of heads, or heads of a group: ranks of one group shard what the heads share, B and
C, and gather it for each token. Context parallelism gathers the projected tokens.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import silu, softplus

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.delta_rule import chunks, decay_mask
from mca_models.megatron.features.feature import (
    Context,
    Feature,
    SpecChanges,
    change_self_attention,
)
from mca_models.megatron.features.kernels import Kernel, find_kernel
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    mixer_spec,
    separate_layer_states,
    spec_in_layers,
)
from mca_models.megatron.layers.sharded import cut_parameter
from mca_models.megatron.names import Implementation
from mca_models.megatron.tensors import seeded_generator
from mca_models.megatron.types import MegatronConfig, PackedSeqParams, Spec, WithBias
from mca_models.templates.parts.mamba import segments

_KERNELS_CHUNK = 256
"""Chunk size of the kernel."""


def state_space_layer(
    x: Tensor, step: Tensor, rate: Tensor, into: Tensor, read: Tensor, skip: Tensor, kernel: Kernel | None
) -> Tensor:
    """Compute a layer's outputs from inputs scaled by their time steps, with the skip connection D.

    Args:
        x: ``[b, s, h, p]``.
        step: ``[b, s, h]``, fp32, at least 0.
        rate: ``[h]``, fp32, below 0: decay rate of a head's state.
        into: ``[b, s, g, n]``, B of each group of heads.
        read: ``[b, s, g, n]``, C.
        skip: ``[h]``, fp32: D, the factor of the skip connection.
        kernel: ``mamba_chunk_scan_combined``; None: plain torch.

    Returns:
        ``[b, s, h, p]`` in fp32.
    """
    if kernel is not None:
        arguments = (part.contiguous() for part in (x, step, rate, into, read))
        out = kernel(*arguments, chunk_size=_KERNELS_CHUNK, D=skip)
        assert isinstance(out, Tensor)
        return out.float()
    x = x.float()
    inputs, into, read = (part.transpose(1, 2) for part in (x * step.unsqueeze(-1), into, read))
    out = state_space(inputs, (rate * step).transpose(1, 2), into, read).transpose(1, 2)
    return out + skip[:, None] * x


def state_space(inputs: Tensor, decay: Tensor, into: Tensor, read: Tensor) -> Tensor:
    """Compute the outputs of all tokens from a zero state.

    Args:
        inputs: ``[b, h, s, p]``, x above.
        decay: ``[b, h, s]``, log of the factor on the state (a above): at most 0.
        into: ``[b, g, s, n]``, B of each group of heads.
        read: ``[b, g, s, n]``, C.

    Returns:
        ``[b, h, s, p]`` in fp32.
    """
    length, groups = inputs.shape[2], into.shape[1]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    x = chunks(inputs.to(dtype)).unflatten(1, (groups, -1))  # [b, g, heads, chunks, CHUNK, p]
    log_decay = chunks(decay.to(dtype).unsqueeze(-1)).cumsum(-2).unflatten(1, (groups, -1))  # G
    b, c = (chunks(part.to(dtype)).unsqueeze(2) for part in (into, read))  # the same for each head of a group
    last = log_decay[..., -1:, :]
    within = ((c @ b.mT) * decay_mask(log_decay.squeeze(-1))) @ x
    added = ((last - log_decay).exp() * b).mT @ x  # what a chunk adds to the state
    state = torch.zeros_like(added[..., 0, :, :])
    before = []
    for i in range(x.shape[3]):
        before.append(state)
        state = last[..., i, :, :].exp() * state + added[..., i, :, :]
    out = within + (log_decay.exp() * c) @ torch.stack(before, 3)
    whole: Tensor = out.flatten(1, 2).flatten(2, 3)[:, :, :length]
    return whole


_HEADS = ("dt_bias", "A_log", "D")
_PARTS = ("z", "x", "B", "C", "dt")
_FUSED = {"in_proj.weight": slice(None), "conv1d.weight": slice(1, 4), "conv1d.bias": slice(1, 4)}
"""Parts of each fused tensor."""


class HeadGroups:
    """Groups of one tensor rank's heads.

    Args:
        count: Groups of the model, a multiple or a divisor of the number of ranks.
        ranks: All tensor ranks.
    """

    def __init__(self, count: int, ranks: ProcessGroup) -> None:
        self.every_rank, self.here = ranks, max(count // ranks.size(), 1)
        self.sharing = max(ranks.size() // count, 1)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather ``[..., n]`` of the ranks that share this rank's group as ``[..., ranks, n]``."""
        if self.sharing == 1:
            return x.unsqueeze(-2)
        from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region

        ranks = self.every_rank
        every = all_gather_last_dim_from_tensor_parallel_region(x.contiguous(), group=ranks)
        first = ranks.rank() // self.sharing * self.sharing
        shared: Tensor = every.unflatten(-1, (ranks.size(), -1)).narrow(-2, first, self.sharing)
        return shared


class GatedNorm(torch.nn.Module):
    """RMSNorm of the channels of each group of heads, after or before multiplying by their gate."""

    def __init__(
        self, config: MegatronConfig, channels: int, groups: HeadGroups, *, gate_first: bool
    ) -> None:
        super().__init__()
        self.groups, self.eps, self.gate_first = groups, config.layernorm_epsilon, gate_first
        self.weight = cut_parameter((channels,), config.params_dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``[..., channels]`` in fp32."""
        factor = silu(gate.float())
        return self._normal(x * factor) if self.gate_first else self._normal(x) * factor

    def _normal(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.groups.here, -1))
        means = self.groups.gathered(x.square().mean(-1)).mean(-2)
        normal = x * torch.rsqrt(means.unsqueeze(-1) + self.eps)
        scaled: Tensor = self.weight * normal.flatten(-2)
        return scaled


class Mamba(SequenceMixer):
    """Mamba 2 layer with one tensor rank's heads; `mixer_spec` mixes in ``MegatronModule``."""

    cut = (*_HEADS, "conv1d.weight", "conv1d.bias", "norm.weight")
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor

    def __init__(
        self, config: MegatronConfig, model: McaModelConfig, column: Typed, row: Typed, **options: Typed
    ) -> None:
        super().__init__(config)
        self.groups = options["pg_collection"]
        tp, sizes = self.groups.tp.size(), segments(model)
        self.sizes = [size // tp for size in sizes]
        self.head_groups = HeadGroups(given(model.mamba).mamba_num_groups, self.groups.tp)
        self.least_step = given(model.mamba).mamba_least_step
        self.in_proj, self.out_proj = self._projections(column, row, rows=sum(sizes), inside=sizes[0])
        channels, kernel = sum(self.sizes[1:4]), given(model.mamba).mamba_conv_kernel_dim
        self.conv1d = CausalConvolution.build(
            channels, kernel, config, bias=given(model.mamba).mamba_conv_bias
        )
        self.scan = find_kernel("mamba_chunk_scan_combined", config)
        for name in _HEADS:
            setattr(self, name, cut_parameter((self.sizes[4],), config.params_dtype))
        self.norm, first = None, given(model.mamba).mamba_norm == "gated"
        if given(model.mamba).mamba_norm != "none":
            self.norm = GatedNorm(config, self.sizes[0], self.head_groups, gate_first=first)
        self.factors = given(model.mamba).mamba_multipliers
        self.fused = {name: (self.sizes[parts], _PARTS[parts]) for name, parts in _FUSED.items()}

    def forward(self, hidden_states: Tensor, *args: Typed, **options: Typed) -> WithBias:
        """Map ``[s / cp, b, hidden]`` to the same shape; other arguments of an attention are ignored."""
        output = super().forward(hidden_states, *args, **options)
        return output if self.factors is None else (output[0] * self.factors[-1], None)

    def _project(self, hidden_states: Tensor) -> Tensor:
        mixed = super()._project(hidden_states)
        if self.factors is None:
            return mixed
        parts = zip(mixed.split(self.sizes, -1), self.factors[:-1], strict=True)
        return torch.cat([part * factor for part, factor in parts], -1)

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections ``[s, b, z x B C dt]`` of one sequence to normalized, gated values ``[s, b, x]``."""
        inside, _, states, _, count = self.sizes
        gate, convolving, step = mixed.split([inside, inside + 2 * states, count], -1)
        mixed_in = self.conv1d(convolving.permute(1, 2, 0)).transpose(1, 2)
        x, shared = mixed_in.split([inside, 2 * states], -1)
        into, read = self.head_groups.gathered(shared).unflatten(-1, (2, -1)).unbind(-2)
        step = softplus(step.float() + self.dt_bias.float()).clamp(min=self.least_step).transpose(0, 1)
        into, read = (part.flatten(-2).unflatten(-1, (self.head_groups.here, -1)) for part in (into, read))
        rate, x = -self.A_log.float().exp(), x.unflatten(-1, (count, -1))
        out = state_space_layer(x, step, rate, into, read, self.D.float(), self.scan)
        out = out.transpose(0, 1).flatten(2)
        gated: Tensor = out * silu(gate.float()) if self.norm is None else self.norm(out, gate)
        return gated.to(mixed.dtype)


def mamba_spec(implementation: Implementation, config: McaModelConfig) -> Spec:
    """Return the spec of a Mamba layer of ``config``, in place of attention or parallel to it."""
    norm = not given(config.mamba).mamba_parallel_attention
    return mixer_spec(Mamba, config, implementation, norm=norm)


def with_parallel_mamba(attention: type, model: McaModelConfig, implementation: Implementation) -> type:
    """Return an attention class without biases that adds the output of a parallel Mamba layer (Falcon H1).

    Args:
        attention: Megatron's class.
        model: The model.
        implementation: Implementation of Mamba's linears.
    """
    factor = given(model.mamba).attention_out_multiplier

    class ParallelMamba(attention):  # type: ignore[misc]
        """Attention and Mamba on the same normalized input."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            from megatron.core.transformer.spec_utils import build_module

            super().__init__(config, *args, **kwargs)
            spec = mamba_spec(implementation, model)
            self.mamba = build_module(spec, config=config, pg_collection=self.pg_collection)

        def forward(
            self,
            hidden_states: Tensor,
            *args: object,
            packed_seq_params: PackedSeqParams = None,
            **kwargs: object,
        ) -> WithBias:
            """Map ``[s / cp, b, hidden]`` to the same shape."""
            packed = {"packed_seq_params": packed_seq_params}
            states, _ = self.mamba(hidden_states, **packed)
            attended, _ = super().forward(hidden_states, *args, **packed, **kwargs)
            return attended * factor + states, None

    return ParallelMamba


def _parallel(context: Context) -> SpecChanges:
    if not context.config.has_parallel_mamba:
        return SpecChanges()
    return change_self_attention(
        lambda attention: with_parallel_mamba(attention, context.config, context.implementation)
    )


def _start(name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """Return initial values of Mamba's per-head parameters: time steps of 0.001 to 0.1, and decay rates."""
    if name.endswith("dt_bias"):
        drawn = torch.empty(shape).uniform_(0.0, 1.0, generator=seeded_generator(f"{seed}/{name}"))
        steps = (drawn * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).exp()
        return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
    if name.endswith("A_log"):
        return torch.arange(1, shape[0] + 1).float().log()
    return (
        torch.ones(shape)
        if name.endswith((".D", "self_attention.norm.weight", "mamba.norm.weight"))
        else None
    )


MAMBA = Feature(
    name="Mamba",
    enabled=lambda config: config.mamba is not None,
    spec=_parallel,
    layer=spec_in_layers("mamba", lambda context: mamba_spec(context.implementation, context.config)),
    start=_start,
    settings=separate_layer_states,
)
