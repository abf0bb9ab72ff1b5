"""Kimi Delta Attention: a gated delta net with per-channel decay, which may be bounded, and low-rank or full gates."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.delta_rule import delta_rule
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.gated_delta_net import HeadNorm
from mca_models.megatron.features.kernels import find_kernel
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    linear_attention_settings,
    mixer_in_layers,
)
from mca_models.megatron.layers.sharded import ReplicatedLinear, cut_parameter
from mca_models.megatron.types import MegatronConfig

_PARTS = ["query", "key", "value", "beta"]
_PARTS_WITH_GATES = ["query", "key", "value", "write", "decay", "gate"]


class KimiDeltaAttention(SequenceMixer):
    """Kimi Delta Attention without its input norm, which is in the layer; `mixer_spec` mixes in ``MegatronModule``."""

    cut = ("A_log", "dt_bias", "conv1d.weight")

    def __init__(
        self, config: MegatronConfig, model: McaModelConfig, column: Typed, row: Typed, **options: Typed
    ) -> None:
        super().__init__(config)
        linear, self.groups, dtype = (
            given(model.linear_attention),
            options["pg_collection"],
            config.params_dtype,
        )
        self.low_rank, self.bound = linear.linear_low_rank_gates, linear.linear_decay_bound
        self.width = linear.linear_key_head_dim
        self.heads = linear.linear_num_key_heads // self.groups.tp.size()
        rows, share = linear.linear_num_key_heads * self.width, self.heads * self.width
        inside = 3 * rows + linear.linear_num_key_heads + (0 if self.low_rank else 2 * rows)
        self.in_proj, out_proj = self._projections(column, row, rows=inside, inside=rows)
        if self.low_rank:
            options = {"config": config, "init_method": config.init_method}
            self.gates_down = ReplicatedLinear(config.hidden_size, 2 * self.width, **options)
            options |= {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
            self.fade_up, self.gate_up = (
                column(self.width, rows, tp_group=self.groups.tp, **options) for _ in range(2)
            )
        self.conv1d = CausalConvolution.build(3 * share, linear.linear_conv_kernel_dim, config)
        self.dt_bias, self.A_log = cut_parameter((share,), dtype), cut_parameter((self.heads,), dtype)
        self.rule = find_kernel("chunk_kda", config)
        projected = [share] * 3 + [self.heads] + [share] * (0 if self.low_rank else 2)
        parts = _PARTS if self.low_rank else _PARTS_WITH_GATES
        self.fused = {"in_proj.weight": (projected, parts), "conv1d.weight": ([share] * 3, parts[:3])}
        self.out_norm, self.out_proj = HeadNorm(config, self.width, config.layernorm_epsilon), out_proj

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


def _is_enabled(config: McaModelConfig) -> bool:
    linear = config.linear_attention
    return linear is not None and linear.linear_channel_decay


KIMI_DELTA_ATTENTION = Feature(
    name="Kimi Delta Attention",
    enabled=_is_enabled,
    settings=linear_attention_settings,
    layer=mixer_in_layers("linear_attention", KimiDeltaAttention, norm=False),
)
