"""Command A and R7B: HF ``Cohere2ForCausalLM``: Command R, layers with a window rotate, others do not."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import cohere
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.dual_rope import restore_layer_types
from mca_models.templates.exaone4 import pattern, rotated_windows


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, and the factor on logits."""
    return cohere.scale(hf) | rotated_windows(hf.get("layer_types") or pattern(hf))


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"logit_scale": 1 / config.head.logits_scaling, **restore_layer_types(config)}


CONFIG = replace(
    cohere.CONFIG,
    fields=(*cohere.CONFIG.fields, Field("window_size", "sliding_window", 4096)),
    defaults={"pad_token_id": 0},
    derive=derive,
    restore=restore,
)

FAMILY = replace(cohere.FAMILY, model_type="cohere2", architecture="Cohere2ForCausalLM", config=CONFIG)
