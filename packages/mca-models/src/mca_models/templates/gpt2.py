"""GPT-2: HF ``GPT2LMHeadModel``: learned positions, LayerNorms, biases everywhere; weights stored as ``[in, out]``."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, DropoutTogether, Field, Fixed
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import fused_qkv, renamed
from mca_models.templates.parts.legacy import (
    BARE,
    GPT_DROPOUTS,
    gpt2_around,
    gpt2_heads,
    gpt2_layer_rules,
    gpt_masks,
    write_gpt2_heads,
)
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, Transposed

GPTJ = get_family("gptj")

CONFIG = ConfigTable(
    fields=(
        *(its for its in GPTJ.table.fields if its.mca not in ("tie_word_embeddings", *GPT_DROPOUTS)),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        *(Field(mca, hf, 0.1) for mca, hf in GPT_DROPOUTS.items()),
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
    aliases=GPTJ.table.aliases,
    facts=(Lens(gpt2_heads, write_gpt2_heads),),
)


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether the names lack the prefix."""
    return {BARE: True} if "wte.weight" in names else {}


def masks(config: FamilyConfig) -> frozenset[str]:
    """Masks that old files hold."""
    start = "" if config.extra.get(BARE) else "transformer."
    return gpt_masks(f"{start}h.{{layer}}.attn", config)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    turned = [
        replace(rule, hf_layout=Transposed(rule.hf_layout)) if rule.mca.endswith(_LINEARS) else rule
        for rule in gpt2_layer_rules(config, fused_qkv(config))
    ]
    named = gpt2_around(config, turned)
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
    fp8_unsupported="its weights are stored as [in, out]",
)
