"""VaultGemma: HF ``VaultGemmaForCausalLM``: Gemma 2 without the post-norms."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.weights import Param

GEMMA2 = get_family("gemma2")

CONFIG = replace(GEMMA2.table, constants={**GEMMA2.table.constants, "norm_placement": "pre"})


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), {"post_attention_layernorm": "pre_feedforward_layernorm"})


FAMILY = Family(model_type="vaultgemma", architecture="VaultGemmaForCausalLM", config=CONFIG, params=params)
