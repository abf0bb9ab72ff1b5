"""Hunyuan, dense: HF ``HunYuanDenseV1ForCausalLM``: norms on the heads of q and k, after the rope."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    HfConfig,
    dense_fields,
    head_dim,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.weights import Param

QK_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def derive_rope(hf: HfConfig) -> JsonObject:
    """Derive the rope; a dynamic one with an ``alpha`` is an unscaled one with a larger base at any length."""
    rope, dim = read_rope(hf), hf.get("head_dim") or head_dim(hf)
    scaling = rope["rope_scaling"] or {}
    if scaling.get("rope_type") == "dynamic" and scaling.get("alpha"):
        base = rope["rotary_base"] * scaling["alpha"] ** (dim / (dim - 2))
        return {**rope, "rotary_base": base, "rope_scaling": None}
    return rope


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"pad_token_id": 0},
    constants={"qk_layernorm": True, "qk_layernorm_after_rope": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(Lens(derive_rope),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), QK_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", config=CONFIG, params=params
)
