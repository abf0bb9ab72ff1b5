"""Qwen 2 and 2.5: HF ``Qwen2ForCausalLM``, Llama's weights with biases on q, k and v."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import SILU, ConfigTable, dense_fields
from mca_models.templates.dual_rope import FULL, SLIDING, restore_layer_types
from mca_models.templates.family import Family


def window(hf: JsonObject) -> JsonObject:
    """The sliding window, which only layers from ``max_window_layers`` on have, and only if switched on."""
    if not hf.get("use_sliding_window"):
        return {"window_size": None, "layer_types": None}
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [FULL if i < first else SLIDING for i in range(hf["num_hidden_layers"])]
    return {"window_size": hf.get("sliding_window", 4096), "layer_types": tuple(kinds)}


def restore_window(config: McaModelConfig) -> JsonObject:
    """Restore HF keys, as ``ConfigTable.restore``."""
    if config.attention.window_size is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": config.attention.window_size,
        **restore_layer_types(config),
    }


CONFIG = ConfigTable(
    fields=dense_fields(),
    constants={"add_qkv_bias": True},
    fixed=(SILU,),
    derive=window,
    restore=restore_window,
)

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=CONFIG,
    params=dense_layers,
)
