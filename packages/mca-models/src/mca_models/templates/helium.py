"""Helium: HF ``HeliumForCausalLM``, Llama's weights; the rope turns neighbouring channels."""

from mca_models.templates.config_table import SWIGLU_WITHOUT_BIASES, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-8),
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5, "pad_token_id": 3},
    constants={"rotary_interleaved": True},
    fixed=SWIGLU_WITHOUT_BIASES,
)

FAMILY = Family(model_type="helium", architecture="HeliumForCausalLM", config=CONFIG, params=dense_layers)
