"""GLM 4.5 and 4.6: HF ``Glm4MoeForCausalLM``: sigmoid routing with a bias, partial rotary."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.common import attention, embedding, head
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, dense_fields
from mca_models.templates.deepseek_v3 import grouped_experts, restore_groups
from mca_models.templates.family import Family
from mca_models.templates.moe import expert_fields, last_layer, mlp_layers
from mca_models.templates.mtp import mtp_copies, mtp_params
from mca_models.templates.names import MoeNames
from mca_models.weights import Param, each

NAMES = MoeNames()

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *expert_fields(count="n_routed_experts"),
        Field("qk_layernorm", "use_qk_norm", False),
        Field("add_qkv_bias", "attention_bias", False),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0),
    ),
    defaults={"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    constants={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
    },
    fixed=(
        SILU,
        Fixed("norm_topk_prob", (True,), "Megatron normalises sigmoid scores over the chosen experts"),
    ),
    derive=grouped_experts,
    restore=restore_groups,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = attention(config)
    layers = each(rules, layers=range(config.num_layers))
    mtp = mtp_params(config, last_layer(config, NAMES, rules))
    return [embedding(), *layers, *mlp_layers(config, NAMES), *mtp, *head(config)]


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
    copies=mtp_copies,
)
