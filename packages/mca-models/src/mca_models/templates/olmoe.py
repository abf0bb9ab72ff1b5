"""OLMoE: HF ``OlmoeForCausalLM``: experts in every layer, QK-norm over all heads."""

from functools import partial

from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import expert_fields, moe_params, sparse_layers, write_sparse
from mca_models.templates.parts.names import MoeNames


def derive(hf: HfConfig) -> JsonObject:
    """Derive the router weights of experts, which all layers have, and the load-balancing loss."""
    return sparse_layers({**hf, "decoder_sparse_step": 1, "mlp_only_layers": []})


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_experts", default=64, ffn="intermediate_size"),
        Field("clip_qkv", "clip_qkv", None),
    ),
    defaults={"pad_token_id": 1, "router_aux_loss_coef": 0.01},
    constants={"qk_layernorm": True, "qk_layernorm_full_width": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    aliases={"num_local_experts": "num_experts"},
    facts=(Lens(derive, write_sparse),),
)

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=MoeNames()),
    moe=MoeNames(),
)
