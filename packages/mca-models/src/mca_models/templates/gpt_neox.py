"""GPT-NeoX and Pythia: HF ``GPTNeoXForCausalLM``: parallel attention and MLP, each after a LayerNorm."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig, read_rope
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import BOTH
from mca_models.templates.parts.common import renamed
from mca_models.templates.parts.legacy import FUSED_FIELDS, equal_heads, fused_params, gpt_masks, token_head
from mca_models.weights import Param

OUTER = {
    "model.layers.{layer}.self_attn": "gpt_neox.layers.{layer}.attention",
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.final_layernorm": "gpt_neox.final_layer_norm",
    "model.": "gpt_neox.",
}
MODULES = "module_names"
"""The fact in ``extra`` that the output layer is called as transformers' module, not as files call it."""


def derive(hf: HfConfig) -> JsonObject:
    """Derive the parallel block, and RoPE under this family's names."""
    base, share = hf.get("rotary_emb_base", 1e4), hf.get("rotary_pct", 0.25)
    rope = {**hf, "rope_theta": base, "partial_rotary_factor": share}
    side_by_side = hf.get("use_parallel_residual", True)
    return {**equal_heads(hf), **read_rope(rope), "parallel_block": "two_norms" if side_by_side else "none"}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"use_parallel_residual": values["parallel_block"] != "none"}


CONFIG = ConfigTable(
    fields=(
        *(field for field in FUSED_FIELDS if field.mca != "pad_token_id"),  # its row is trained
        Field("hidden_act", "hidden_act", "gelu"),
    ),
    constants={"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
    fixed=(
        Fixed("attention_bias", (True,), BOTH),
        Fixed("hidden_dropout", (0.0,), "embeddings have no dropout here"),
    ),
    facts=(Lens(derive, write),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    output = {} if config.extra.get(MODULES) else {"lm_head": "embed_out"}
    return renamed(fused_params(config), OUTER | output | token_head(config))


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    config=CONFIG,
    params=params,
    module_names={MODULES: True},
    ignored_hf=lambda config: gpt_masks("gpt_neox.layers.{layer}.attention", config),
)
