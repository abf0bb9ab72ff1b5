"""Gated delta net: Megatron's module with mca's forward pass.

Megatron's forward pass needs CUDA kernels, and supports context parallelism and packed sequences in some versions only.
Its parameters, their names and their distributed checkpoint are unchanged.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.delta_rule import delta_rule
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.kernels import find_kernel
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    linear_attention_settings,
    normed_linears,
    spec_in_layers,
)
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import MegatronConfig, Spec, Upstream


class HeadNorm(Norm):
    """RMSNorm of each value head; never zero-centered."""

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        self.offset = 0.0
        self.sequence_parallel = config.sequence_parallel
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` in its dtype; the weight's gradient is summed over tensor ranks."""
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        # with sequence parallelism Megatron sums the gradients of all norms itself
        weight = self.weight if self.sequence_parallel else copy_to_tensor_model_parallel_region(self.weight)
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * normal.to(x.dtype)


def delta_net_spec(config: McaModelConfig, implementation: Implementation) -> Spec:
    """Return the spec of a gated delta net block."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    column, row = normed_linears(implementation)
    submodules = GatedDeltaNetSubmodules(in_proj=column, out_norm=HeadNorm, out_proj=row)
    module = _module(
        given(config.linear_attention).linear_beta_factor,
        given(config.linear_attention).linear_norm_epsilon or config.norm.layernorm_epsilon,
    )
    return ModuleSpec(module=module, submodules=submodules)


@cache
def _module(beta_factor: float, epsilon: float) -> type:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    class DeltaNet(SequenceMixer, GatedDeltaNet):  # type: ignore[misc]
        """Megatron's gated delta net without its choice of kernels."""

        out_norm: HeadNorm
        conv1d: CausalConvolution
        A_log: Tensor
        dt_bias: Tensor
        tp_size: int
        qk_dim: int
        v_dim: int
        key_head_dim: int
        value_head_dim: int
        num_value_heads: int

        def __init__(
            self, *args: object, cp_comm_type: object = None, pp_layer_offset: object = None, **kwargs: object
        ) -> None:
            with _without_kernel_check(GatedDeltaNet):
                super().__init__(*args, **kwargs)
            self.groups = self.pg_collection
            self.out_norm.eps = epsilon
            self.rule = find_kernel("chunk_gated_delta_rule", self.config)
            convolution = self._modules["conv1d"]
            assert isinstance(convolution, torch.nn.Conv1d)
            self.conv1d = CausalConvolution.from_conv1d(
                convolution, find_kernel("causal_conv1d_fn", self.config)
            )

        def _setup_variant_attrs(self) -> None:
            super()._setup_variant_attrs()
            self.gated_delta_rule = delta_rule

        def _sequence(self, mixed: Tensor) -> Tensor:
            """Map projections ``[s, b, q k v z b a]`` of one sequence to normalized, gated values ``[s, b, v]``."""
            tp = self.tp_size
            key_rows, value_rows, heads = self.qk_dim // tp, self.v_dim // tp, self.num_value_heads // tp
            qkv, gate, beta, fade = mixed.split([2 * key_rows + value_rows, value_rows, heads, heads], -1)
            qkv = self.conv1d(qkv.permute(1, 2, 0)).transpose(1, 2)
            query, key, value = qkv.split([key_rows, key_rows, value_rows], -1)
            query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
            value = value.unflatten(-1, (-1, self.value_head_dim))
            decay = -self.A_log.float().exp() * softplus(fade.float() + self.dt_bias)
            beta = beta.sigmoid() * beta_factor
            out = delta_rule(query, key, value, decay.transpose(0, 1), beta.transpose(0, 1), self.rule)
            out = self.out_norm(out.transpose(0, 1).to(mixed.dtype))
            gated: Tensor = (out.flatten(2) * silu(gate.float())).to(mixed.dtype)
            return gated

    return DeltaNet


@contextmanager
def _without_kernel_check(megatron: type) -> Iterator[None]:
    """Disable the check for kernels in Megatron's constructor, which mca's forward pass does not use."""
    modules: list[Upstream] = [sys.modules[base.__module__] for base in megatron.__mro__]
    checked = [module for module in modules if hasattr(module, "HAVE_FLA")]
    before = [module.HAVE_FLA for module in checked]
    for module in checked:
        module.HAVE_FLA = True
    try:
        yield
    finally:
        for module, value in zip(checked, before, strict=True):
            module.HAVE_FLA = value


def _is_enabled(config: McaModelConfig) -> bool:
    linear = config.linear_attention
    return linear is not None and not linear.linear_channel_decay


GATED_DELTA_NET = Feature(
    name="gated delta net",
    enabled=_is_enabled,
    settings=linear_attention_settings,
    layer=spec_in_layers(
        "linear_attention", lambda context: delta_net_spec(context.config, context.implementation)
    ),
)
