"""MiniCPM 3: HF ``MiniCPM3ForCausalLM``: MLA with non-interleaved RoPE, factors as Granite's."""

from math import sqrt

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
    head_dim,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.mla import LATENT_FIELDS, key_channels, mla_dense_params


def derive(hf: HfConfig) -> JsonObject:
    """Heads, and the factors on residuals and logits."""
    layers, base = hf["num_hidden_layers"], hf.get("dim_model_base") or hf["hidden_size"]
    depth = hf["scale_depth"]
    return {
        **key_channels(hf),
        "residual_multiplier": 1.0 if depth is None else depth / sqrt(layers),
        "logits_scaling": hf["hidden_size"] / base,
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    depth = round(values["residual_multiplier"] * sqrt(values["num_layers"]), 9)
    return {"scale_depth": depth, "dim_model_base": round(values["hidden_size"] / values["logits_scaling"])}


CONFIG = ConfigTable(
    fields=(
        *(its for its in dense_fields(tied=True, eps=1e-5) if its.mca != "kv_channels"),
        *(its for its in LATENT_FIELDS if its.mca != "v_head_dim"),
        Field("v_head_dim", "v_head_dim", head_dim),
        Field("embedding_multiplier", "scale_emb", 12),
    ),
    defaults={
        **{"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
        **{"scale_depth": 1.4, "dim_model_base": 256, "num_key_value_heads": 40, "initializer_range": 0.1},
    },
    constants={"qk_layernorm": True, "rotary_halves": True},
    fixed=SWIGLU_WITHOUT_BIASES,
    facts=(Lens(derive, write),),
)

FAMILY = Family(
    model_type="minicpm3", architecture="MiniCPM3ForCausalLM", config=CONFIG, params=mla_dense_params
)
