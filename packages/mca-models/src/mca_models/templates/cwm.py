"""Code World Model: HF ``CwmForCausalLM``, Llama's weights; three of four layers have a sliding window."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.rope import FULL, LLAMA3, SLIDING, write_layer_types

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


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"sliding_window": values["window_size"] or 0, **write_layer_types(values)}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"num_key_value_heads": 8, "rope_theta": _ROPE["rope_theta"]},
    fixed=SWIGLU_WITHOUT_BIASES,
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="cwm", architecture="CwmForCausalLM", config=CONFIG, params=dense_layers)
