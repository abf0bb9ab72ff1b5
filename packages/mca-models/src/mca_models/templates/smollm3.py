"""SmolLM 3: HF ``SmolLM3ForCausalLM``, Llama's weights; every fourth layer is NoPE."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SWIGLU_WITHOUT_BIASES, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.sliding_window import write_window


def derive(hf: HfConfig) -> JsonObject:
    """Layers without rope (HF lists those *with* it under ``no_rope_layers``), which may have a window."""
    step = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(hf["num_hidden_layers"])]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types") or ["full_attention" if yes else "sliding_attention" for yes in rotated]
    return {
        "no_rope_freq": tuple(1 - int(yes) for yes in rotated),
        "window_size": window,
        "layer_types": tuple(kinds) if window else None,
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    rotated = [1 - skip for skip in values["no_rope_freq"] or (0,) * values["num_layers"]]
    return {"no_rope_layers": rotated, **write_window(values)}


CONFIG = ConfigTable(
    fields=dense_fields(tied=True),
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "pad_token_id": 128004},
    fixed=SWIGLU_WITHOUT_BIASES,
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", config=CONFIG, params=dense_layers)
