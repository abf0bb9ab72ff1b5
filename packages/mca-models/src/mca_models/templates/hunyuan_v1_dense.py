"""Hunyuan, dense: HF ``HunYuanDenseV1ForCausalLM``: QK-norm for each head, after RoPE."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.names import QK_NORMS
from mca_models.templates.parts.rope import alpha_rope
from mca_models.weights import Param

CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"pad_token_id": 0},
    constants={"qk_layernorm": True, "qk_layernorm_after_rope": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(Lens(alpha_rope),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), QK_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", config=CONFIG, params=params
)
