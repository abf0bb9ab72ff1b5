"""DeepSeek V3 and R1: HF ``DeepseekV3ForCausalLM``: MLA, experts, multi-token prediction. Kimi K2 has other sizes."""

from dataclasses import replace

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, Fixed
from mca_models.templates.family import Family
from mca_models.templates.parts.mla import INTERLEAVED, MLA_FIELDS, SIGMOID_MLA, mla_moe_params
from mca_models.templates.parts.moe import NORMALISED, SIGMOID_ROUTER
from mca_models.templates.parts.mtp import mtp_copies
from mca_models.templates.parts.names import MoeNames

CONFIG = ConfigTable(
    fields=MLA_FIELDS,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "num_nextn_predict_layers": 1,
    },
    constants={"qk_layernorm": True, **SIGMOID_ROUTER},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NORMALISED,
        Fixed("scoring_func", ("sigmoid",), "DeepSeek V3's router"),
        Fixed("topk_method", ("noaux_tc",), "DeepSeek V3's router"),
        Fixed("moe_layer_freq", (1,), "every layer after the first dense ones has experts"),
        INTERLEAVED,
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    facts=(SIGMOID_MLA,),
)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=CONFIG,
    params=mla_moe_params,
    moe=MoeNames(),
    copies=mtp_copies,
)
KIMI_K2 = replace(FAMILY, model_type="kimi_k2", in_transformers=False)
