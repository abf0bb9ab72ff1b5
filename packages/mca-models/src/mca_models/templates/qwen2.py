"""Qwen 2 and 2.5: HF ``Qwen2ForCausalLM``, Llama's weights with biases on q, k and v."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.dual_rope import FULL, SLIDING, write_layer_types


def window(hf: JsonObject) -> JsonObject:
    """The sliding window, which only layers from ``max_window_layers`` on have, and only if switched on."""
    if not hf.get("use_sliding_window"):
        return {"window_size": None, "layer_types": None}
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [FULL if i < first else SLIDING for i in range(hf["num_hidden_layers"])]
    return {"window_size": hf.get("sliding_window", 4096), "layer_types": tuple(kinds)}


def write_window(values: Values) -> JsonObject:
    """Write the HF keys."""
    if values["window_size"] is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": values["window_size"], **write_layer_types(values)}


CONFIG = ConfigTable(
    fields=dense_fields(),
    constants={"add_qkv_bias": True},
    fixed=(SILU,),
    facts=(Lens(window, write_window),),
)

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=CONFIG,
    params=dense_layers,
)
