"""OLMo 2: HF ``Olmo2ForCausalLM``: norms after each block, and over all heads of q and of k."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"pad_token_id": 1},
    constants={"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_full_width": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
)

FAMILY = Family(model_type="olmo2", architecture="Olmo2ForCausalLM", config=CONFIG, params=dense_layers)
