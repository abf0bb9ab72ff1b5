"""HyperCLOVA X: HF ``HyperCLOVAXForCausalLM``: Granite with post-norms, and a factor on logits."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, Field, HfConfig, head_dim
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.weights import Param

GRANITE = get_family("granite")

SANDWICH = {
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


def derive(hf: HfConfig) -> JsonObject:
    """Norms, and the factor on logits, by which this family multiplies."""
    placement = "sandwich" if hf.get("use_post_norm", True) else "pre"
    return {"norm_placement": placement, "logits_scaling": 1 / hf.get("logits_scaling", 1.0)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        "use_post_norm": values["norm_placement"] == "sandwich",
        "logits_scaling": 1 / values["logits_scaling"],
    }


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = dense_layers(config)
    return renamed(rules, SANDWICH) if config.norm.norm_placement == "sandwich" else rules


OTHERS = ("softmax_scale", "logits_scaling")
CONFIG = ConfigTable(
    fields=(
        *(field for field in GRANITE.table.fields if field.mca not in OTHERS),
        Field(
            "softmax_scale", "attention_multiplier", lambda hf: (hf.get("head_dim") or head_dim(hf)) ** -0.5
        ),
    ),
    fixed=GRANITE.table.fixed,
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="hyperclovax", architecture="HyperCLOVAXForCausalLM", config=CONFIG, params=params)
