"""GPT-J: HF ``GPTJForCausalLM``: parallel attention and MLP after one LayerNorm, biases in the MLP only."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.legacy import GPT_DROPOUTS, GPT_OUTER, gpt_masks
from mca_models.weights import Param

INNER = {
    **{"self_attn.o_proj": "attn.out_proj", "self_attn.": "attn.", "input_layernorm": "ln_1"},
    **{"up_proj": "fc_in", "down_proj": "fc_out"},
}


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head, and how much of it is rotated, by a rope that transformers has no keys for."""
    width = hf["n_embd"] // hf["n_head"]
    sizes = {"num_query_groups": hf["n_head"], "kv_channels": width}
    rope = {"rotary_base": 10000.0, "rope_scaling": None}
    return {**sizes, **rope, "rotary_percent": (hf.get("rotary_dim") or width) / width}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    rotated = round(values["kv_channels"] * values["rotary_percent"])
    return {"rotary_dim": rotated, "activation_function": values["hidden_act"]}


CONFIG = ConfigTable(
    fields=(
        Field("num_layers", "n_layer"),
        Field("hidden_size", "n_embd"),
        Field("num_attention_heads", "n_head"),
        Field("ffn_hidden_size", "n_inner", lambda hf: 4 * hf["n_embd"]),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
        Field("init_method_std", "initializer_range", 0.02),
        Field("tie_word_embeddings", "tie_word_embeddings", False),
        Field("hidden_act", "activation_function", "gelu_new"),
        *(Field(mca, hf, 0.0) for mca, hf in GPT_DROPOUTS.items()),
    ),
    defaults={"rotary_dim": 64},
    constants={
        **{"normalization": "LayerNorm", "parallel_block": "one_norm", "rotary_interleaved": True},
        **{"add_bias_linear": True, "add_bias_attention": False, "output_bias": True},
        "gated_linear_unit": False,
    },
    fixed=(Fixed("embd_pdrop", (0.0,), "embeddings have no dropout here"),),
    aliases={
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        "max_position_embeddings": "n_positions",
    },
    facts=(Lens(derive, write),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(renamed(dense_layers(config), INNER), GPT_OUTER)


FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    config=CONFIG,
    params=params,
    ignored_hf=lambda config: gpt_masks("transformer.h.{layer}.attn", config),
)
