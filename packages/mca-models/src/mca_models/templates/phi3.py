"""Phi 3 and 4: HF ``Phi3ForCausalLM``: q, k, v in one tensor, gate and up too, partial and long rope."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import attention, dense_mlp, embedding, fused_mlp, fused_qkv, head
from mca_models.templates.config_table import (
    ORIGINAL,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.weights import Param, expand_rules


def long_rope(hf: HfConfig) -> JsonObject:
    """The rope, its scaling by its present name and with the original context, which HF keeps outside of it."""
    rope = read_rope(hf)
    if rope["rope_scaling"] is not None:
        kind = rope["rope_scaling"]["rope_type"]
        rope["rope_scaling"] |= {"rope_type": "longrope" if kind in ("su", "yarn") else kind}
        inside = rope["rope_scaling"].get(ORIGINAL)
        rope["rope_scaling"][ORIGINAL] = hf.get(ORIGINAL) or inside or hf["max_position_embeddings"]
    return rope


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {ORIGINAL: (config.rope.rope_scaling or {}).get(ORIGINAL, 4096)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        Field("window_size", "sliding_window", None),
        Field("hidden_dropout", "resid_pdrop", 0.0),
    ),
    defaults={"pad_token_id": 32000, ORIGINAL: 4096},
    fixed=(SILU,),
    derive=long_rope,
    restore=restore,
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config, fused_qkv(config)), *dense_mlp(config, fused_mlp())]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


FAMILY = Family(model_type="phi3", architecture="Phi3ForCausalLM", config=CONFIG, params=params)
