"""Command R: HF ``CohereForCausalLM``: attention and MLP side by side after one LayerNorm without a bias."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    HfConfig,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family


def scale(hf: HfConfig) -> JsonObject:
    """The factor on logits, by which this family multiplies."""
    return {"logits_scaling": 1 / hf.get("logit_scale", 0.0625)}


def derive(hf: HfConfig) -> JsonObject:
    """The factor on logits, and the norms of q and k."""
    own = bool(hf.get("use_qk_norm", False))
    return {"qk_layernorm": own, "qk_layernorm_per_head": own, **scale(hf)}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"logit_scale": 1 / config.head.logits_scaling, "use_qk_norm": config.attention.qk_layernorm}


CONFIG = ConfigTable(
    fields=norm_epsilon(dense_fields(tied=True, eps=1e-5), "layer_norm_eps"),
    defaults={"pad_token_id": 0, "rope_theta": 5e5},
    constants={
        **{"normalization": "LayerNorm", "norm_bias": False},
        **{"parallel_block": "one_norm", "rotary_interleaved": True},
    },
    fixed=(SILU, NO_ATTENTION_BIAS),
    derive=derive,
    restore=restore,
)

FAMILY = Family(model_type="cohere", architecture="CohereForCausalLM", config=CONFIG, params=dense_layers)
