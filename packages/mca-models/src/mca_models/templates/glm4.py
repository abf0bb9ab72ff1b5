"""GLM 4, dense: HF ``Glm4ForCausalLM``: pre- and post-norms, one tensor for gate and up.

Half of each head is rotated, in pairs of neighbours.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import attention, dense_mlp, embedding, fused_mlp, head, renamed
from mca_models.weights import Param, expand_rules

_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Names that differ from those of other families with pre- and post-norms."""

CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1.5625e-07), Field("add_qkv_bias", "attention_bias", True)),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 151329,
    },
    constants={"norm_placement": "sandwich", "rotary_interleaved": True},
    fixed=(SILU,),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = renamed([*attention(config), *dense_mlp(config, fused_mlp())], _NORMS)
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


FAMILY = Family(model_type="glm4", architecture="Glm4ForCausalLM", config=CONFIG, params=params)
