"""Ministral 8B: HF ``MinistralForCausalLM``, Mistral's weights with a window in the layers that are named."""

from mca_config.types import JsonObject
from mca_models.templates.config_table import SILU, ConfigTable, Field, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.dual_rope import SLIDING, write_layer_types


def derive(hf: HfConfig) -> JsonObject:
    """Derive the sliding-window layers: all unless listed."""
    if hf.get("sliding_window") is None:
        return {"layer_types": None}
    return {"layer_types": tuple(hf.get("layer_types") or [SLIDING] * hf["num_hidden_layers"])}


CONFIG = ConfigTable(
    fields=(*dense_fields(), Field("window_size", "sliding_window", None)),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    fixed=(SILU,),
    facts=(Lens(derive, write_layer_types),),
)

FAMILY = Family(
    model_type="ministral", architecture="MinistralForCausalLM", config=CONFIG, params=dense_layers
)
