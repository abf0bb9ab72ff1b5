"""Solar Open: HF ``SolarOpenForCausalLM``: GLM 4.5's experts in every layer, Llama's attention."""

from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    expert_fields,
    sigmoid_experts,
    write_groups,
)

GLM4_MOE = get_family("glm4_moe")


def derive(hf: HfConfig) -> JsonObject:
    """Experts in every layer; the keys of dense layers have no effect."""
    experts = sigmoid_experts({**hf, "first_k_dense_replace": 0})
    return {**experts, "ffn_hidden_size": hf["moe_intermediate_size"], "mtp_num_layers": 0}


CONFIG = ConfigTable(
    fields=(
        *(field for field in dense_fields(eps=1e-5) if field.mca != "ffn_hidden_size"),
        *expert_fields(count="n_routed_experts", default=128),
        Field("add_qkv_bias", "attention_bias", False),
        SCALED,
    ),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "n_shared_experts": 1},
    constants=SIGMOID_ROUTER,
    fixed=(SILU, NORMALISED, Fixed("use_qk_norm", (False,), "transformers ignores it")),
    aliases={"num_local_experts": "n_routed_experts"},
    facts=(Lens(derive, write_groups),),
)

FAMILY = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    config=CONFIG,
    params=GLM4_MOE.params,
    moe=GLM4_MOE.moe,
)
