"""Latent attention: its norms and its rope as HF's models have them."""

import copy
from functools import cache

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron.layers.rope import attention_factor, rotary_module
from mca_models.megatron.types import GptModel, MegatronModule, Settings, Spec

EPSILON = 1e-6
"""Of the norms inside HF's latent attention, whatever the model's ``rms_norm_eps`` is; Megatron takes that."""


def set_mla_norm_epsilon(model: GptModel) -> None:
    """Gives the norms inside every latent attention of a chunk, prediction layers included, HF's epsilon."""
    for attention in model.modules():
        if not hasattr(attention, "linear_kv_up_proj"):
            continue
        # the local spec has norms, Transformer Engine's has them in the linears
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            part: MegatronModule = getattr(attention, name, None)
            if hasattr(part, "eps"):
                part.eps = EPSILON


def set_yarn_ramp(model: GptModel, rope: Values | None) -> None:
    """Leaves the ends of yarn's ramp where they fall, between two channels, if the model says so."""
    if rope is None or rope.get("truncate", True):
        return
    for attention in model.modules():
        if hasattr(attention, "linear_kv_up_proj"):
            attention.rotary_pos_emb.correction_range_round_to_int = False


class _Scaled(torch.nn.Module):
    """A rope that gives, as Megatron's yarn does, what cosine and sine are multiplied by."""

    def __init__(self, rotary: MegatronModule, factor: float) -> None:
        super().__init__()
        self.rotary, self.factor = rotary, factor
        self.get_rotary_seq_len = rotary.get_rotary_seq_len

    def forward(self, length: int, packed_seq: bool = False) -> tuple[Tensor, float]:
        """The angles of ``length`` tokens, and the factor."""
        return self.rotary(length, packed_seq=packed_seq), self.factor


def set_mla_rope(model: GptModel, config: McaModelConfig) -> None:
    """Gives every latent attention of a chunk its rope where Megatron has no scaling of that kind."""
    if (config.rope_scaling or {}).get("rope_type", "yarn") == "yarn":
        return
    for attention in model.modules():
        if hasattr(attention, "linear_kv_up_proj"):
            rotary = rotary_module(config, attention.pg_collection.cp)
            attention.rotary_pos_emb = _Scaled(rotary, attention_factor(config))
            attention.config = copy.copy(attention.config)
            attention.config.rope_type = "yarn"  # whose rope comes with a factor


@cache
def with_mla_multipliers(attention: type, of_query: float, of_latent: float) -> type:
    """Megatron's ``MLASelfAttention`` with factors on queries, and on compressed keys and values.

    The latter is on the queries instead of the keys: on the channels that are not rotated.
    """

    class MlaMultipliers(attention):  # type: ignore[misc]
        """Latent attention."""

        def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
            """Queries, keys, values, and what they were compressed to."""
            query, key, value, *compressed = super().get_query_key_value_tensors(*args, **kwargs)
            still, turned = query.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], -1)
            query = torch.cat([still * (of_query * of_latent), turned * of_query], -1)
            return query, key, value * of_latent, *compressed

    return MlaMultipliers


@cache
def with_plain_query(attention: type) -> type:
    """Megatron's ``MLASelfAttention`` with the modules of its spec taken as they are, on megatron-core 0.19.

    There ``qk_layernorm`` without ``q_lora_rank`` puts a norm before the query projection; HF's models have a norm
    on the compressed keys and values only. Earlier versions build just that, and never ask this class.
    """

    class PlainQuery(attention):  # type: ignore[misc]
        """Latent attention without a norm on its queries."""

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
