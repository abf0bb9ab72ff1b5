"""ERNIE 4.5, dense: HF ``Ernie4_5ForCausalLM``, Llama's weights; the rope turns neighbouring channels."""

from mca_models.templates.config_table import SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import NO_BIAS
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=dense_fields(tied=True, eps=1e-5),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "pad_token_id": 0},
    constants={"rotary_interleaved": True},
    fixed=(SILU, NO_BIAS),
)

FAMILY = Family(model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", config=CONFIG, params=dense_layers)
