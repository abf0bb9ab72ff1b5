"""Qwen 3, dense: HF ``Qwen3ForCausalLM``, with norms on the heads of q and k."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.sliding_window import window, write_window

CONFIG = ConfigTable(
    fields=dense_fields(),
    defaults={"head_dim": 128},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(Lens(window, write_window),),
)

FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", config=CONFIG, params=dense_layers)
