"""Command R: HF ``CohereForCausalLM``: parallel attention and MLP after one LayerNorm without a bias."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    HfConfig,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.multipliers import read_logit_scale


def derive(hf: HfConfig) -> JsonObject:
    """The factor on logits, and the norms of q and k."""
    own = bool(hf.get("use_qk_norm", False))
    return {"qk_layernorm": own, "qk_layernorm_per_head": own, **read_logit_scale(hf)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"logit_scale": 1 / values["logits_scaling"], "use_qk_norm": values["qk_layernorm"]}


CONFIG = ConfigTable(
    fields=norm_epsilon(dense_fields(tied=True, eps=1e-5), "layer_norm_eps"),
    defaults={"pad_token_id": 0, "rope_theta": 5e5},
    constants={
        **{"normalization": "LayerNorm", "norm_bias": False},
        **{"parallel_block": "one_norm", "rotary_interleaved": True},
    },
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="cohere", architecture="CohereForCausalLM", config=CONFIG, params=dense_layers)
