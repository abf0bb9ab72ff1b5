"""Qwen 3, dense: HF ``Qwen3ForCausalLM``, with norms on the heads of q and k."""

from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.qwen2 import restore_window, window

CONFIG = ConfigTable(
    fields=dense_fields(),
    defaults={"head_dim": 128},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    derive=window,
    restore=restore_window,
)

FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", config=CONFIG, params=dense_layers)
