"""GPT BigCode, StarCoder 1: HF ``GPTBigCodeForCausalLM``: GPT-2 whose heads may share their keys and values."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import gpt2
from mca_models.templates.common import fused_qkv, grouped_qkv
from mca_models.templates.config_table import HfConfig
from mca_models.templates.family import Family
from mca_models.templates.gemma3_text import GELU
from mca_models.weights import Param


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head, and how many there are of keys."""
    shared = {"num_query_groups": 1} if hf.get("multi_query", True) else {}
    return {**gpt2.derive(hf), **shared}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {**gpt2.restore(config), "multi_query": config.attention.num_query_groups == 1}


CONFIG = replace(
    gpt2.CONFIG,
    defaults={**gpt2.CONFIG.defaults, "activation_function": GELU},
    derive=derive,
    restore=restore,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    shared = config.attention.num_query_groups == 1  # else q, k and v of each head lie together
    projections = fused_qkv(config) if shared else grouped_qkv(config, "qkv_proj")
    return gpt2.around(config, gpt2.layer_rules(config, projections))


FAMILY = Family(model_type="gpt_bigcode", architecture="GPTBigCodeForCausalLM", config=CONFIG, params=params)
