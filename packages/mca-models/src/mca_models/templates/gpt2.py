"""GPT-2: HF ``GPT2LMHeadModel``: learned positions, LayerNorms, biases everywhere; weights lie as ``[in, out]``."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates import gptj
from mca_models.templates.common import attention, dense_mlp, embedding, fused_qkv, head, positions, renamed
from mca_models.templates.config_table import ConfigTable, DropoutTogether, Field, Fixed, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.gpt_neox import token_head
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, Transposed, expand_rules

INNER = {
    **{"self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj", "input_layernorm": "ln_1"},
    **{"post_attention_layernorm": "ln_2", "up_proj": "c_fc", "down_proj": "c_proj"},
}
BARE = "hf_without_prefix"
"""The fact in ``extra`` that names begin with the parts of the model, as in the first published files."""


def derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head."""
    return {"num_query_groups": hf["n_head"], "kv_channels": hf["n_embd"] // hf["n_head"]}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"activation_function": config.mlp.hidden_act}


CONFIG = ConfigTable(
    fields=(
        *(its for its in gptj.CONFIG.fields if its.mca not in ("tie_word_embeddings", *gptj.DROPOUTS)),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        *(Field(mca, hf, 0.1) for mca, hf in gptj.DROPOUTS.items()),
        Field("embedding_dropout", "embd_pdrop", 0.1),
    ),
    defaults={"n_positions": 1024},
    constants={
        **{"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
        "learned_positions": True,
    },
    fixed=(
        DropoutTogether("embd_pdrop", "resid_pdrop", 0.1),
        Fixed("scale_attn_weights", (True,), "scores are divided by the root of a head's channels"),
        Fixed("scale_attn_by_inverse_layer_idx", (False,), "scores of all layers have one scale"),
        Fixed("add_cross_attention", (False,), "a decoder without an encoder"),
    ),
    aliases=gptj.CONFIG.aliases,
    derive=derive,
    restore=restore,
)


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether the names lack the prefix."""
    return {BARE: True} if "wte.weight" in names else {}


def masks(config: FamilyConfig) -> frozenset[str]:
    """Masks that old files hold."""
    start = "" if config.extra.get(BARE) else "transformer."
    return gptj.masks(f"{start}h.{{layer}}.attn", config)


def layer_rules(config: McaModelConfig, projections: Sequence[Param]) -> list[Param]:
    """The rules of one layer under this family's names."""
    return renamed([*attention(config, projections), *dense_mlp(config)], INNER)


def around(config: McaModelConfig, rules: Sequence[Param]) -> list[Param]:
    """Every parameter of the model whose layers have ``rules``, in checkpoint order."""
    table = renamed([positions()], {"model.embed_positions": "transformer.wpe"})
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed([embedding(), *table, *layers, *head(config)], gptj.OUTER | token_head(config))


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    turned = [
        replace(rule, hf_layout=Transposed(rule.hf_layout)) if rule.mca.endswith(_LINEARS) else rule
        for rule in layer_rules(config, fused_qkv(config))
    ]
    named = around(config, turned)
    return renamed(named, {"transformer.": ""}) if config.extra.get(BARE) else named


_LINEARS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")

FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config=CONFIG,
    params=params,
    detect_extra=detect_extra,
    ignored_hf=masks,
    module_names={BARE: False},
    fp8_unsupported="its weights lie as [in, out]",
)
