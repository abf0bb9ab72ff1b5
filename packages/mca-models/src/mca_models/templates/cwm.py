"""Code World Model: HF ``CwmForCausalLM``, Llama's weights; three of four layers have a sliding window."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import (
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.dual_rope import FULL, SLIDING, restore_layer_types
from mca_models.templates.family import Family

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE = {**LLAMA3, "rope_theta": 1e6, "factor": 16.0}
"""Default of transformers where ``config.json`` has no rope."""


def derive(hf: HfConfig) -> JsonObject:
    """Each layer's kind, and the family's own rope if none is named."""
    pattern = [SLIDING if i % 4 else FULL for i in range(hf["num_hidden_layers"])]
    window = hf.get("sliding_window", 8192) or None
    kinds = tuple(hf.get("layer_types") or pattern) if window else None
    named = any(hf.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    rope = {} if named else read_rope({"rope_parameters": _ROPE})
    return {"window_size": window, "layer_types": kinds, **rope}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"sliding_window": config.attention.window_size or 0, **restore_layer_types(config)}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"num_key_value_heads": 8, "rope_theta": _ROPE["rope_theta"]},
    fixed=SWIGLU_WITHOUT_BIASES,
    derive=derive,
    restore=restore,
)

FAMILY = Family(model_type="cwm", architecture="CwmForCausalLM", config=CONFIG, params=dense_layers)
