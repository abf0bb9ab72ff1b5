"""Multi-latent attention (MLA): norms and RoPE as in HF's models."""

import copy
import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed, Values
from mca_models.megatron.features.feature import ClassChange, Context, Feature, Setup, SpecChanges
from mca_models.megatron.features.recurrent_layers import normed_linears
from mca_models.megatron.layers.rope import attention_factor, rotary_module, yarn_factor, yarn_scale
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, Settings, Spec

_SAME_NAME = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
EPSILON = 1e-6
"""Epsilon of the norms inside HF's MLA; Megatron uses the model's ``rms_norm_eps`` instead."""


def set_mla_norm_epsilon(model: GptModel) -> None:
    """Set HF's epsilon in the norms inside every MLA of a chunk, MTP layers included."""
    for attention in model.modules():
        if not hasattr(attention, "linear_kv_up_proj"):
            continue
        # the local spec has norms, Transformer Engine fuses them into the linears
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: MegatronModule = getattr(attention, name, None)
            if hasattr(module, "eps"):
                module.eps = EPSILON


def set_yarn_ramp(model: GptModel, rope: Values | None) -> None:
    """Disable the rounding of yarn's correction range if the model's ``truncate`` is false."""
    if rope is None or rope.get("truncate", True):
        return
    for attention in model.modules():
        if hasattr(attention, "linear_kv_up_proj"):
            attention.rotary_pos_emb.correction_range_round_to_int = False


class _ScaledRope(torch.nn.Module):
    """RoPE that also returns the factor on cosine and sine, as Megatron's yarn does."""

    def __init__(self, rotary: MegatronModule, factor: float) -> None:
        super().__init__()
        self.rotary, self.factor = rotary, factor
        self.get_rotary_seq_len = rotary.get_rotary_seq_len

    def forward(self, length: int, packed_seq: bool = False) -> tuple[Tensor, float]:
        """Return the angles of ``length`` tokens, and the factor."""
        return self.rotary(length, packed_seq=packed_seq), self.factor


def set_mla_rope(model: GptModel, config: McaModelConfig) -> None:
    """Set the RoPE of every MLA of a chunk for rope types that Megatron does not support."""
    if (config.rope.rope_scaling or {}).get("rope_type", "yarn") == "yarn":
        return
    for attention in model.modules():
        if hasattr(attention, "linear_kv_up_proj"):
            rotary = rotary_module(config, attention.pg_collection.cp)
            attention.rotary_pos_emb = _ScaledRope(rotary, attention_factor(config))
            attention.config = copy.copy(attention.config)
            attention.config.rope_type = "yarn"  # RoPE type that comes with a factor


def set_no_rope(model: GptModel, config: McaModelConfig) -> None:
    """Disable the rotation of MLA in a chunk's layers without RoPE."""
    without = config.rope.no_rope_freq or (0,) * config.num_layers
    for layer in model.decoder.layers:
        rope = getattr(layer.self_attention, "rotary_pos_emb", None)
        if without[layer.layer_number - 1] and rope is not None:
            rope.inv_freq = torch.zeros_like(rope.inv_freq)


@cache
def with_mla_multipliers(attention: type, query_factor: float, latent_factor: float) -> type:
    """Return an ``MLASelfAttention`` class with factors on queries, and on compressed keys and values.

    The factor on compressed keys is applied to the non-rotated channels of the queries instead.
    """

    class MlaMultipliers(attention):  # type: ignore[misc]
        """MLA with factors."""

        def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
            """Return queries, keys, values, and the compressed tensors."""
            query, key, value, *compressed = super().get_query_key_value_tensors(*args, **kwargs)
            nope, rotated = query.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], -1)
            query = torch.cat([nope * (query_factor * latent_factor), rotated * query_factor], -1)
            return query, key, value * latent_factor, *compressed

    return MlaMultipliers


@cache
def with_latent_head_gate(attention: type, column: type) -> type:
    """Return an ``MLASelfAttention`` class with a sigmoid gate on the output of each head.

    Args:
        attention: Megatron's class.
        column: The class of column-parallel linears.
    """

    class GatedMla(attention):  # type: ignore[misc]
        """MLA with a gate for each head."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            linear: Typed = column
            self.linear_head_gate = linear(
                config.hidden_size,
                config.num_attention_heads,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )
            self.gate: Tensor | None = None
            self.linear_proj.register_forward_pre_hook(self._apply_gate)

        def get_query_key_value_tensors(
            self, hidden_states: Tensor, *args: object, **kwargs: object
        ) -> tuple[Tensor, ...]:
            """Return queries, keys, values, and the compressed tensors."""
            self.gate, _ = self.linear_head_gate(hidden_states)
            tensors: tuple[Tensor, ...] = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
            return tensors

        def _apply_gate(self, linear: MegatronModule, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            """Multiply the output of each head ``[s, b, heads * channels]`` by its gate."""
            gate, self.gate = self.gate, None
            assert gate is not None
            heads = args[0].unflatten(-1, (gate.shape[-1], -1))
            return (heads * gate.float().sigmoid().to(heads.dtype).unsqueeze(-1)).flatten(-2), *args[1:]

    return GatedMla


@cache
def with_plain_query(attention: type) -> type:
    """Return an ``MLASelfAttention`` class without a norm on its queries, for megatron-core 0.19.

    There ``qk_layernorm`` without ``q_lora_rank`` adds a norm before the query projection; HF's models have a norm on
    the compressed keys and values only. Earlier versions build that, and do not call this method.
    """

    class PlainQuery(attention):  # type: ignore[misc]
        """MLA without a norm on its queries."""

        def _resolve_qk_norm_config(self, submodules: Spec) -> Settings:
            from megatron.core.transformer.identity_op import IdentityOp

            return {
                "linear_q_proj": submodules.linear_q_proj,
                "linear_q_up_proj": IdentityOp,
                "linear_kv_up_proj": submodules.linear_kv_up_proj,
                "q_layernorm": IdentityOp,
                "kv_layernorm": submodules.kv_layernorm or IdentityOp,
            }

    return PlainQuery


def _finish(model: GptModel, config: McaModelConfig) -> None:
    set_mla_norm_epsilon(model)
    set_yarn_ramp(model, config.rope.rope_scaling)
    set_mla_rope(model, config)
    set_no_rope(model, config)


def change_mla(change: ClassChange) -> SpecChanges:
    """Return the ``change`` of Megatron's MLA class."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    return SpecChanges(classes={MLASelfAttention: change})


def _spec(context: Context) -> SpecChanges:
    mla = given(context.config.mla)
    factors = mla.query_multiplier, mla.latent_multiplier

    def adapt(attention: type) -> type:
        attention = attention if mla.q_lora_rank else with_plain_query(attention)
        if mla.latent_head_gate:
            column, _ = normed_linears(context.implementation, norm=False)
            attention = with_latent_head_gate(attention, column)
        return attention if factors == (1.0, 1.0) else with_mla_multipliers(attention, *factors)

    return change_mla(adapt)


def _mla_rope(config: McaModelConfig) -> Settings:
    rope = config.rope.rope_scaling
    settings: Settings = {
        "rotary_base": config.rope.rotary_base,
        "rotary_percent": config.rope.rotary_percent,
    }
    if rope is not None and rope["rope_type"] != "yarn" and rope.get("mscale_all_dim"):
        raise McaError(
            f"mscale_all_dim with rope_type {rope['rope_type']!r} with MLA is not supported; use yarn"
        )
    if rope is None or rope["rope_type"] != "yarn":  # `set_mla_rope` sets RoPE of other types
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    factor, score_scale = yarn_factor(config, rope), rope.get("mscale_all_dim") or 0.0
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings")
        or config.max_position_embeddings,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": _mla_mscale(attention_factor(config), factor, score_scale),
        "mscale_all_dim": score_scale,
    }


def _mla_mscale(on_rope: float, factor: float, score_scale: float) -> float:
    """Return the ``mscale`` with which Megatron computes the factor ``on_rope`` on cosine and sine.

    It computes ``(0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1)``; ``mscale_all_dim`` also scales the
    attention scores.
    """
    if factor > 1:
        return (on_rope * yarn_scale(factor, score_scale) - 1) / (0.1 * math.log(factor))
    if on_rope != 1.0:
        raise McaError(
            f"yarn with MLA, attention_factor {on_rope} and factor {factor} is not supported; "
            "supported: a factor above 1"
        )
    return 1.0


def _settings(config: McaModelConfig) -> Settings:
    mla = given(config.mla)
    return {name: getattr(mla, name) for name in _SAME_NAME} | _mla_rope(config)


def _problems(setup: Setup) -> Iterator[str]:
    settings = setup.settings
    if setup.layout.tp > 1 and not settings.get("sequence_parallel"):
        # On the local layers Megatron sums full gradients of the query norm once per tensor rank. With Transformer
        # Engine the gradient of the rotary key that all heads share is not summed over tensor ranks.
        yield (
            "megatron-core computes wrong gradients of MLA with tensor_model_parallel_size above 1 and no "
            "sequence_parallel; set sequence_parallel to true"
        )
    kind = settings.get("cp_comm_type")
    if setup.layout.cp > 1 and not setup.mca_attention and kind not in (None, "p2p"):
        yield (
            f"Transformer Engine does not support MLA with cp_comm_type {kind}; set it to p2p, or "
            "attention_backend to local"
        )
    rope = (setup.config.rope.rope_scaling or {}).get("rope_type", "yarn")
    if settings.get("apply_rope_fusion") and rope != "yarn":
        yield f"apply_rope_fusion is not supported for MLA with rope_type {rope}; remove it"


MLA = Feature(
    name="MLA",
    enabled=lambda config: config.mla is not None,
    settings=_settings,
    sequence_parallel="always",
    problems=_problems,
    spec=_spec,
    finish=_finish,
)
