"""Youtu-LLM: HF ``YoutuForCausalLM``: DeepSeek's latent attention, no experts."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_mlp, embedding, head
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.deepseek_v3 import INTERLEAVED, LATENT_FIELDS, latent_attention
from mca_models.templates.family import Family
from mca_models.weights import Param, expand_rules


def derive(hf: HfConfig) -> JsonObject:
    """The head dimension of a query or key."""
    return {"kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]}


DERIVED = ("kv_channels", "init_method_std")
CONFIG = ConfigTable(
    fields=(
        *(field for field in dense_fields(tied=True) if field.mca not in DERIVED),
        *LATENT_FIELDS,
        Field("init_method_std", "initializer_range", lambda hf: 2 / (5 * hf["hidden_size"]) ** 0.5),
    ),
    defaults={"q_lora_rank": 1536},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS, INTERLEAVED),
    derive=derive,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*latent_attention(config), *dense_mlp(config)]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


FAMILY = Family(model_type="youtu", architecture="YoutuForCausalLM", config=CONFIG, params=params)
