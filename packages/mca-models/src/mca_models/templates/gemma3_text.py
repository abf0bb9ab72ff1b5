"""Gemma 3, the text model: HF ``Gemma3ForCausalLM``: pre- and post-norms, windows, two RoPEs."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import GELU_ONLY, GELU_SANDWICH, NO_BIDIRECTIONAL
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.multipliers import scales, write_scale
from mca_models.templates.parts.rope import FULL, SLIDING, derive_dual_rope, write_dual_rope


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, a rope for each kind, and the scales that HF computes from sizes."""
    step = hf.get("sliding_window_pattern") or 6
    kinds = hf.get("layer_types") or [
        SLIDING if (i + 1) % step else FULL for i in range(hf["num_hidden_layers"])
    ]
    return {
        **derive_dual_rope(hf, hf.get("rope_theta", 1e6), hf.get("rope_local_base_freq", 1e4)),
        "layer_types": tuple(kinds),
        **scales(hf),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        **write_dual_rope(values),
        "layer_types": list(values["layer_types"] or ()),
        **write_scale(values),
    }


CONFIG = ConfigTable(
    fields=(*dense_fields(tied=True), Field("window_size", "sliding_window", None)),
    defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "pad_token_id": 0},
    constants={**GELU_SANDWICH, "qk_layernorm": True},
    fixed=(
        NO_ATTENTION_BIAS,
        GELU_ONLY,
        Fixed("attn_logit_softcapping", (None,), "Gemma 3 has none"),
        Fixed("final_logit_softcapping", (None,), "Gemma 3 has none"),
        NO_BIDIRECTIONAL,
    ),
    facts=(Lens(derive, write),),
)

FAMILY = Family(
    model_type="gemma3_text", architecture="Gemma3ForCausalLM", config=CONFIG, params=dense_layers
)
