"""Ministral 3: HF ``Ministral3ForCausalLM``: Mistral, queries beyond the first context grow with their position."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_layers
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

ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""What transformers takes where ``config.json`` names no rope."""


HEAT = {"beta": "llama_4_scaling_beta", "length": ORIGINAL}


def derive(hf: HfConfig) -> JsonObject:
    """The rope, and how queries grow."""
    return heated(hf, ROPE)


def heated(hf: HfConfig, default: JsonObject) -> JsonObject:
    """The rope, and how queries grow, which its parameters say; ``default`` if there are none."""
    own = {**default, "max_position_embeddings": hf["max_position_embeddings"]}
    said = hf.get("rope_scaling") or hf.get("rope_parameters") or own
    rope = read_rope({**hf, "rope_parameters": said})
    said = {**said, **(rope["rope_scaling"] or {})}
    if missing := [key for key in HEAT.values() if said.get(key) is None]:
        raise HfConfigError(f"config.json: 'rope_parameters' has no {missing[0]}; this family needs it")
    heat = {name: said[key] for name, key in HEAT.items()}
    return {**rope, "attn_temperature": {**heat, "first": 0}}


def restore(config: McaModelConfig) -> HfConfig:
    """See ``ConfigTable.restore``."""
    scaling = {"rope_theta": config.rotary_base, "rope_type": "default", **(config.rope_scaling or {})}
    heat = config.attn_temperature or {}
    return {"rope_parameters": {**scaling, **{key: heat[name] for name, key in HEAT.items()}}}


CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11},
    fixed=(SILU,),
    derive=derive,
    restore=restore,
)

FAMILY = Family(
    model_type="ministral3", architecture="Ministral3ForCausalLM", config=CONFIG, params=dense_layers
)
