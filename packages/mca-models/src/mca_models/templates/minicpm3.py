"""MiniCPM 3: HF ``MiniCPM3ForCausalLM``: latent attention that is rotated in halves, factors as Granite's."""

from math import sqrt

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import youtu
from mca_models.templates.config_table import (
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
    head_dim,
)
from mca_models.templates.deepseek_v3 import LATENT_FIELDS
from mca_models.templates.family import Family


def derive(hf: HfConfig) -> JsonObject:
    """Heads, and the factors on residuals and logits."""
    layers, base = hf["num_hidden_layers"], hf.get("dim_model_base") or hf["hidden_size"]
    depth = hf["scale_depth"]
    return {
        **youtu.derive(hf),
        "residual_multiplier": 1.0 if depth is None else depth / sqrt(layers),
        "logits_scaling": hf["hidden_size"] / base,
    }


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    depth = round(config.block.residual_multiplier * sqrt(config.num_layers), 9)
    return {"scale_depth": depth, "dim_model_base": round(config.hidden_size / config.head.logits_scaling)}


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
    derive=derive,
    restore=restore,
)

FAMILY = Family(model_type="minicpm3", architecture="MiniCPM3ForCausalLM", config=CONFIG, params=youtu.params)
