"""LFM2: HF ``Lfm2ForCausalLM``: gated short convolutions in most layers, attention with QK-norm in the others."""

import math

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_mlp, embedding, head
from mca_models.templates.parts.short_convolution import (
    DEFAULTS,
    FIELDS,
    LAYER_TYPES,
    NO_CONV_BIAS,
    lfm2_names,
    mixers,
)
from mca_models.weights import Param, expand_rules


def read(hf: HfConfig) -> JsonObject:
    """Derive the width of the MLP: two thirds of ``intermediate_size`` times a factor, rounded up to a multiple."""
    width = hf["intermediate_size"]
    if hf.get("block_auto_adjust_ff_dim", True):
        multiple = hf.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        if (factor := hf.get("block_ffn_dim_multiplier", 1.0)) is not None:
            width = multiple * math.ceil(int(factor * width) / multiple)
    return {"ffn_hidden_size": width}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"intermediate_size": values["ffn_hidden_size"], "block_auto_adjust_ff_dim": False}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return lfm2_names([embedding(), *mixers(config), *mlps, *head(config)])


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    config=ConfigTable(
        fields=FIELDS,
        defaults=DEFAULTS,
        constants={"qk_layernorm": True},
        fixed=(NO_CONV_BIAS,),
        aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        facts=(LAYER_TYPES, Lens(read, write)),
    ),
    params=params,
)
