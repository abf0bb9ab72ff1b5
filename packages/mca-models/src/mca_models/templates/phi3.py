"""Phi 3 and 4: HF ``Phi3ForCausalLM``: q, k, v in one tensor, gate and up too, partial RoPE and longrope."""

from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.templates.config_table import ORIGINAL, SILU, ConfigTable, Field, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, dense_mlp, embedding, fused_mlp, fused_qkv, head
from mca_models.templates.parts.rope import long_rope
from mca_models.weights import Param, expand_rules


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {ORIGINAL: (values["rope_scaling"] or {}).get(ORIGINAL, 4096)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        Field("window_size", "sliding_window", None),
        Field("hidden_dropout", "resid_pdrop", 0.0),
    ),
    defaults={"pad_token_id": 32000, ORIGINAL: 4096},
    fixed=(SILU,),
    facts=(Lens(long_rope, write),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config, fused_qkv(config)), *dense_mlp(config, fused_mlp())]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


FAMILY = Family(model_type="phi3", architecture="Phi3ForCausalLM", config=CONFIG, params=params)
