"""OPT: HF ``OPTForCausalLM``: learned positions, LayerNorms, biases everywhere, ReLUs."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head, positions, renamed
from mca_models.weights import Param, expand_rules

INNER = {
    **{"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"},
    **{"o_proj": "out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
}
OUTER = {"model.norm": "model.decoder.final_layer_norm", "model.": "model.decoder."}
OTHERS = ("ffn_hidden_size", "num_query_groups", "kv_channels", "layernorm_epsilon", "init_method_std")


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head."""
    heads, size = hf["num_attention_heads"], hf["hidden_size"]
    own = Fixed("word_embed_proj_dim", (size, None), "embeddings are as wide as layers")
    own.check({"word_embed_proj_dim": size, **hf})
    return {"num_query_groups": heads, "kv_channels": size // heads}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"activation_function": values["hidden_act"], "do_layer_norm_before": True}


CONFIG = ConfigTable(
    fields=(
        *(its for its in dense_fields(tied=True) if its.mca not in OTHERS),
        Field("ffn_hidden_size", "ffn_dim", 3072),
        Field("init_method_std", "init_std", 0.02),
        Field("add_bias_linear", "enable_bias", True),
        Field("hidden_act", "activation_function", "relu"),
        Field("hidden_dropout", "dropout", 0.1),
    ),
    defaults={"pad_token_id": 1, "max_position_embeddings": 2048},
    constants={
        **{"normalization": "LayerNorm", "layernorm_epsilon": 1e-5, "gated_linear_unit": False},
        **{"learned_positions": True, "position_offset": 2},
    },
    fixed=(
        Fixed("do_layer_norm_before", (True,), "350M alone has its post-norms, on the residual"),
        Fixed("_remove_final_layer_norm", (False,), "there is a last norm"),
        Fixed("layer_norm_elementwise_affine", (True,), "norms have weights"),
        Fixed("layerdrop", (0.0, 0), "no layer is left out in training"),
    ),
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = renamed([*attention(config), *dense_mlp(config)], INNER)
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed([embedding(), positions(), *layers, *head(config)], OUTER)


FAMILY = Family(model_type="opt", architecture="OPTForCausalLM", config=CONFIG, params=params)
