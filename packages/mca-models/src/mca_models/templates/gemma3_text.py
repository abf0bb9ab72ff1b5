"""Gemma 3, the text model: HF ``Gemma3ForCausalLM``: norms around each block, windows, two ropes."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.dual_rope import FULL, SLIDING, derive_dual_rope, restore_dual_rope
from mca_models.templates.family import Family

GELU = "gelu_pytorch_tanh"
CONSTANTS: Values = {
    "hidden_act": GELU,
    "layernorm_zero_centered_gamma": True,
    "norm_placement": "sandwich",
}
GELU_ONLY = Fixed("hidden_activation", (GELU,), "Gemma's gated MLP")
CAUSAL = Fixed("use_bidirectional_attention", (False, None), "Megatron's decoder is causal")


def scales(hf: HfConfig) -> JsonObject:
    """The factors on scores and embeddings that HF computes from sizes."""
    return {
        "softmax_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
    }


def restore_scale(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": round((config.attention.softmax_scale or 1.0) ** -2),
    }


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


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {
        **restore_dual_rope(config),
        "layer_types": list(config.layer_types or ()),
        **restore_scale(config),
    }


CONFIG = ConfigTable(
    fields=(*dense_fields(tied=True), Field("window_size", "sliding_window", None)),
    defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "pad_token_id": 0},
    constants={**CONSTANTS, "qk_layernorm": True},
    fixed=(
        NO_ATTENTION_BIAS,
        GELU_ONLY,
        Fixed("attn_logit_softcapping", (None,), "Gemma 3 has none"),
        Fixed("final_logit_softcapping", (None,), "Gemma 3 has none"),
        CAUSAL,
    ),
    derive=derive,
    restore=restore,
)

FAMILY = Family(
    model_type="gemma3_text", architecture="Gemma3ForCausalLM", config=CONFIG, params=dense_layers
)
