"""BLOOM: HF ``BloomForCausalLM``: ALiBi, LayerNorms, of embeddings too, biases everywhere."""

from collections.abc import Collection, Mapping

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import renamed, with_norm_biases
from mca_models.templates.parts.legacy import BARE, FALCON_OUTER, fused_params, token_head
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, Stage

NORM = Param(
    mca="embedding.layernorm.weight", hf=("model.word_embeddings_layernorm.weight",), stage=Stage.FIRST
)


def _heads(hf: HfConfig) -> int:
    return int(hf.get("n_head") or hf.get("num_attention_heads") or 8)


def _size(hf: HfConfig) -> int:
    return int(hf.get("n_embed") or hf.get("hidden_size") or 64)


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of heads and of the MLP; positions have no end."""
    heads, size = _heads(hf), _size(hf)
    ends = {"max_position_embeddings": hf.get("seq_length") or 2048, "ffn_hidden_size": 4 * size}
    return {"num_query_groups": heads, "kv_channels": size // heads, **ends}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"seq_length": values["max_position_embeddings"]}


CONFIG = ConfigTable(
    fields=(
        Field("num_layers", "n_layer", lambda hf: hf.get("num_hidden_layers", 2)),
        Field("hidden_size", "hidden_size", _size),
        Field("num_attention_heads", "n_head", _heads),
        Field("vocab_size", "vocab_size"),
        Field("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
        Field("init_method_std", "initializer_range", 0.02),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("hidden_dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
    ),
    constants={
        **{"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
        **{"alibi": True, "embedding_layernorm": True, "hidden_act": "gelu_pytorch_tanh"},
    },
    fixed=(
        Fixed("apply_residual_connection_post_layernorm", (False,), "residuals are what was not normalized"),
    ),
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    facts=(Lens(derive, write),),
)


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether the names lack the prefix, as in the first published files."""
    return {BARE: True} if "word_embeddings.weight" in names else {}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    first, *rest = fused_params(config)
    own = {"model.word_embeddings_layernorm": "transformer.word_embeddings_layernorm"}
    norm = renamed(with_norm_biases(config, [NORM]), own)
    named = [*renamed([first], FALCON_OUTER), *norm, *renamed(rest, FALCON_OUTER | token_head(config))]
    return renamed(named, {"transformer.": ""}) if config.extra.get(BARE) else named


FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_extra,
    module_names={BARE: False},
)
