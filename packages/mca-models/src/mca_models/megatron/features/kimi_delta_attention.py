"""Kimi Delta Attention: a gated delta net with per-channel decay, which may be bounded, and low-rank or full gates."""

import math
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mca_config.model.linear_attention import LinearAttention
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.delta_rule import delta_rule
from mca_models.megatron.features.feature import Feature, LayerContext, SpecChanges
from mca_models.megatron.features.gated_delta_net import HeadNorm
from mca_models.megatron.features.kernels import find_kernel
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    linear_attention_settings,
    normed_linears,
)
from mca_models.megatron.layers.sharded import ReplicatedLinear, cut_parameter
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import (
    GroupCollection,
    MegatronConfig,
    MegatronModule,
    ShardedState,
    Spec,
)

_PARTS = ["query", "key", "value", "beta"]
_PARTS_WITH_GATES = ["query", "key", "value", "write", "decay", "gate"]


def kimi_delta_spec(implementation: Implementation, linear: LinearAttention) -> Spec:
    """Return the spec of a Kimi Delta Attention block."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    classes = normed_linears(implementation, norm=False)
    return ModuleSpec(module=_module(*classes, linear.linear_low_rank_gates, linear.linear_decay_bound))


def _sharded_state(
    block: MegatronModule, prefix: str, offsets: tuple[object, ...], metadata: ShardedState | None
) -> ShardedState:
    from megatron.core import parallel_state
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory
    from megatron.core.transformer.utils import (
        make_sharded_tensors_for_checkpoint,
        sharded_state_dict_default,
    )

    groups = {
        "tp_group": block.groups.tp,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    tensors: ShardedState = {
        "A_log": block.A_log,
        "dt_bias": block.dt_bias,
        "conv1d.weight": block.conv1d.weight,
    }
    state: ShardedState = make_sharded_tensors_for_checkpoint(
        tensors, prefix, dict.fromkeys(tensors, 0), offsets, **groups
    )
    for name, module in block.named_children():
        if name != "conv1d":
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", offsets, metadata, tp_group=block.groups.tp
            )
    share = block.heads * block.width
    projected = [share] * 3 + [block.heads] + [share] * (0 if block.low_rank else 2)
    parts = _PARTS if block.low_rank else _PARTS_WITH_GATES
    for name, rows in (("in_proj.weight", projected), ("conv1d.weight", [share] * 3)):
        whole = state[f"{prefix}{name}"]
        state[f"{prefix}{name}"] = _split_tensor_factory(whole, rows, parts[: len(rows)], 0)
    return state


class KimiDeltaAttention(SequenceMixer):
    """Kimi Delta Attention without its input norm, which is in the layer; `_module` mixes in ``MegatronModule``."""

    column: ClassVar[Typed]
    row: ClassVar[Typed]
    low_rank: ClassVar[bool]
    bound: ClassVar[float | None]

    def __init__(
        self,
        config: MegatronConfig,
        submodules: object = None,
        layer_number: int = 1,
        *,
        pg_collection: GroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.groups, self.width = pg_collection, config.linear_key_head_dim
        self.heads = config.linear_num_key_heads // self.groups.tp.size()
        rows, width = config.linear_num_key_heads * self.width, self.width
        plain = {"config": config, "bias": False, "is_expert": False, "tp_group": self.groups.tp}
        first = {
            **plain,
            "init_method": config.init_method,
            "gather_output": False,
            "skip_bias_add": False,
        }
        hidden, gates = config.hidden_size, 0 if self.low_rank else 2 * rows
        self.in_proj = self.column(hidden, 3 * rows + config.linear_num_key_heads + gates, **first)
        if self.low_rank:
            self.gates_down = ReplicatedLinear(
                hidden, 2 * width, config=config, init_method=config.init_method
            )
            self.fade_up, self.gate_up = (self.column(width, rows, **first) for _ in range(2))
        self._make_parameters(config)
        self.out_norm = HeadNorm(config, width, config.layernorm_epsilon)
        last = {"init_method": config.output_layer_init_method, "input_is_parallel": True}
        self.out_proj = self.row(rows, hidden, **plain, **last, skip_bias_add=True)

    def _make_parameters(self, config: MegatronConfig) -> None:
        share, dtype = self.heads * self.width, config.params_dtype
        convolution = torch.nn.Conv1d(
            3 * share, 3 * share, config.linear_conv_kernel_dim, groups=3 * share, bias=False, dtype=dtype
        )
        self.conv1d = CausalConvolution.from_conv1d(convolution, find_kernel("causal_conv1d_fn", config))
        self.conv1d.weight = cut_parameter(tuple(self.conv1d.weight.shape), dtype)
        self.dt_bias, self.A_log = cut_parameter((share,), dtype), cut_parameter((self.heads,), dtype)
        if config.perform_initialization:
            with torch.no_grad():
                self.conv1d.reset_parameters()
                self.A_log.uniform_(1, 16).log_()
                step = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
                step.add_(torch.log(-torch.expm1(-step)))
        self.rule = find_kernel("chunk_kda", config)

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Map ``[s / cp, b, hidden]`` to ``[s / cp, b, q k v b fade gate]``."""
        mixed = super()._project(hidden_states)
        if not self.low_rank:
            return mixed
        down, _ = self.gates_down(hidden_states)
        ups = zip((self.fade_up, self.gate_up), down.chunk(2, -1), strict=True)
        return torch.cat([mixed, *(up(x)[0] for up, x in ups)], -1)

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections ``[s, b, q k v b fade gate]`` of one sequence to normalized, gated values ``[s, b, v]``."""
        share = self.heads * self.width
        qkv, beta, fade, gate = mixed.split([3 * share, self.heads, share, share], -1)
        qkv = self.conv1d(qkv.permute(1, 2, 0)).transpose(1, 2)
        query, key, value = (x.unflatten(-1, (-1, self.width)) for x in qkv.chunk(3, -1))
        steps = (fade.float() + self.dt_bias.float()).unflatten(-1, (-1, self.width))
        rate = self.A_log.float().exp().unsqueeze(-1)
        decay = -rate * softplus(steps) if self.bound is None else self.bound * (rate * steps).sigmoid()
        out = delta_rule(query, key, value, decay.transpose(0, 1), beta.sigmoid().transpose(0, 1), self.rule)
        normal = self.out_norm(out.transpose(0, 1).float()).flatten(2)
        gated: Tensor = (normal * gate.float().sigmoid()).to(mixed.dtype)
        return gated

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[object, ...] = (),
        metadata: ShardedState | None = None,
    ) -> ShardedState:
        """Return the sharded state; fused projection and convolution are split into their parts."""
        return _sharded_state(self, prefix, sharded_offsets, metadata)


@cache
def _module(column: type, row: type, low_rank: bool, bound: float | None) -> type:
    from megatron.core.transformer.module import MegatronModule as Module

    fixed = {"column": column, "row": row, "low_rank": low_rank, "bound": bound}
    return type("KimiDeltaAttention", (KimiDeltaAttention, Module), fixed)


def _is_enabled(config: McaModelConfig) -> bool:
    linear = config.linear_attention
    return linear is not None and linear.linear_channel_decay


def _layer(context: LayerContext) -> SpecChanges:
    if context.kind != "linear_attention":
        return SpecChanges()
    linear = given(context.config.linear_attention)
    return SpecChanges({"self_attention": lambda _: kimi_delta_spec(context.implementation, linear)})


KIMI_DELTA_ATTENTION = Feature(
    name="Kimi Delta Attention", enabled=_is_enabled, settings=linear_attention_settings, layer=_layer
)
