"""GLM 4.5 and 4.6: HF ``Glm4MoeForCausalLM``: sigmoid routing with a bias, partial rotary."""

from functools import partial

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.moe import (
    GROUPED_EXPERTS,
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    expert_fields,
    moe_params,
)
from mca_models.templates.parts.mtp import mtp_copies
from mca_models.templates.parts.names import MoeNames

NAMES = MoeNames()

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *expert_fields(count="n_routed_experts", default=128),
        Field("qk_layernorm", "use_qk_norm", False),
        Field("add_qkv_bias", "attention_bias", False),
        SCALED,
    ),
    defaults={
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    constants=SIGMOID_ROUTER,
    fixed=(SILU, NORMALISED),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    facts=(GROUPED_EXPERTS,),
    partial_rotary=True,
)


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
    copies=mtp_copies,
)
