"""HyperCLOVA X: HF ``HyperCLOVAXForCausalLM``: Granite with norms after each block, and a factor on logits."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import granite
from mca_models.templates.common import dense_layers, renamed
from mca_models.templates.config_table import ConfigTable, Field, HfConfig, head_dim
from mca_models.templates.family import Family
from mca_models.weights import Param

SANDWICH = {
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


def derive(hf: HfConfig) -> JsonObject:
    """Norms, and the factor on logits, by which this family multiplies."""
    placement = "sandwich" if hf.get("use_post_norm", True) else "pre"
    return {"norm_placement": placement, "logits_scaling": 1 / hf.get("logits_scaling", 1.0)}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {
        "use_post_norm": config.norm.norm_placement == "sandwich",
        "logits_scaling": 1 / config.head.logits_scaling,
    }


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = dense_layers(config)
    return renamed(rules, SANDWICH) if config.norm.norm_placement == "sandwich" else rules


OTHERS = ("softmax_scale", "logits_scaling")
CONFIG = ConfigTable(
    fields=(
        *(field for field in granite.CONFIG.fields if field.mca not in OTHERS),
        Field(
            "softmax_scale", "attention_multiplier", lambda hf: (hf.get("head_dim") or head_dim(hf)) ** -0.5
        ),
    ),
    fixed=granite.CONFIG.fixed,
    derive=derive,
    restore=restore,
)

FAMILY = Family(model_type="hyperclovax", architecture="HyperCLOVAXForCausalLM", config=CONFIG, params=params)
