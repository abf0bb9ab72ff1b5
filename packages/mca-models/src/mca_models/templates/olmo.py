"""OLMo: HF ``OlmoForCausalLM``: LayerNorms without weights; q, k and v may be clipped."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=(
        *(field for field in dense_fields() if field.mca != "layernorm_epsilon"),
        Field("clip_qkv", "clip_qkv", None),
    ),
    defaults={"pad_token_id": 1},
    constants={"normalization": "LayerNorm", "norm_weight": False, "layernorm_epsilon": 1e-5},
    fixed=(SILU, NO_ATTENTION_BIAS),
)

FAMILY = Family(model_type="olmo", architecture="OlmoForCausalLM", config=CONFIG, params=dense_layers)
