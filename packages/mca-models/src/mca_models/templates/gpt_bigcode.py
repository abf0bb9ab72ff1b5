"""GPT BigCode, StarCoder 1: HF ``GPTBigCodeForCausalLM``: GPT-2 with multi-query attention."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import GELU
from mca_models.templates.parts.common import fused_qkv, grouped_qkv
from mca_models.templates.parts.legacy import gpt2_around, gpt2_heads, gpt2_layer_rules, write_gpt2_heads
from mca_models.weights import Param

GPT2 = get_family("gpt2")


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head, and how many there are of keys."""
    shared = {"num_query_groups": 1} if hf.get("multi_query", True) else {}
    return {**gpt2_heads(hf), **shared}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {**write_gpt2_heads(values), "multi_query": values["num_query_groups"] == 1}


CONFIG = replace(
    GPT2.table, defaults={**GPT2.table.defaults, "activation_function": GELU}, facts=(Lens(derive, write),)
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    shared = config.attention.num_query_groups == 1  # else q, k and v of each head lie together
    projections = fused_qkv(config) if shared else grouped_qkv(config, "qkv_proj")
    return gpt2_around(config, gpt2_layer_rules(config, projections))


FAMILY = Family(model_type="gpt_bigcode", architecture="GPTBigCodeForCausalLM", config=CONFIG, params=params)
