"""GLM 4 9B: HF ``GlmForCausalLM``: biases on q, k, v, gate and up in one tensor, half of each head is rotated."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import attention, dense_mlp, embedding, fused_mlp, head
from mca_models.weights import Param, expand_rules

CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1.5625e-07), Field("add_qkv_bias", "attention_bias", True)),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
    },
    constants={"rotary_interleaved": True},
    fixed=(SILU,),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config), *dense_mlp(config, fused_mlp())]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


FAMILY = Family(model_type="glm", architecture="GlmForCausalLM", config=CONFIG, params=params)
