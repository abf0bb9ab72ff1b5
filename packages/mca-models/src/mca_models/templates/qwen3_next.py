"""Qwen 3 Next: HF ``Qwen3NextForCausalLM``: gated delta net, gated attention, experts."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, embedding, head
from mca_models.templates.parts.moe import SHARED_WIDTH, SPARSE_LAYERS, expert_fields, last_layer, mlp_layers
from mca_models.templates.parts.mtp import mtp_params
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.weights import Concat, GroupedHeads, Param, PerTensor

NAMES = MoeNames(shared="mlp.shared_expert.")


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=512), SHARED_WIDTH, *delta.FIELDS),
    defaults={**delta.DEFAULTS, "num_key_value_heads": 2, "norm_topk_prob": True},
    constants={**delta.CONSTANTS, "moe_shared_expert_gate": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(SPARSE_LAYERS, delta.MIXED_LAYERS),
    partial_rotary=True,
)


def in_proj(config: McaModelConfig) -> Param:
    """The input projection, which HF groups by key head: ``[q k v..v z..z]`` and ``[b..b a..a]``."""
    q, k, v, z, b, a = (
        rows // (given(config.linear_attention).linear_num_key_heads or 1) for rows in delta.segments(config)
    )
    return Param(
        mca="",
        hf=(f"{HF}linear_attn.in_proj_qkvz.weight", f"{HF}linear_attn.in_proj_ba.weight"),
        hf_layout=PerTensor(((GroupedHeads((q, k, v, z), 1), 4), (GroupedHeads((b, a), 1), 2))),
        layout=Concat(delta.segments(config)),
    )


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    inside = last_layer(config, NAMES, attention(config))
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    return [embedding(), *layers, *mlp_layers(config, NAMES), *mtp, *head(config)]


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
    count_mtp=delta.detect_mtp_layers,
)
