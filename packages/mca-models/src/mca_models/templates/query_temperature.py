"""A rope whose parameters also say how queries beyond the first context grow with their position."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import ORIGINAL, HfConfig, read_rope

_HEAT = {"beta": "llama_4_scaling_beta", "length": ORIGINAL}


def derive_query_temperature(hf: HfConfig, default: JsonObject) -> JsonObject:
    """The rope, and how queries grow; ``default`` are its parameters where ``config.json`` names none."""
    own = {**default, "max_position_embeddings": hf["max_position_embeddings"]}
    said = hf.get("rope_scaling") or hf.get("rope_parameters") or own
    rope = read_rope({**hf, "rope_parameters": said})
    said = {**said, **(rope["rope_scaling"] or {})}
    if missing := [key for key in _HEAT.values() if said.get(key) is None]:
        raise HfConfigError(f"config.json: 'rope_parameters' has no {missing[0]}; this family needs it")
    heat = {name: said[key] for name, key in _HEAT.items()}
    return {**rope, "attn_temperature": {**heat, "first": 0}}


def restore_query_temperature(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    scaling = {
        "rope_theta": config.rope.rotary_base,
        "rope_type": "default",
        **(config.rope.rope_scaling or {}),
    }
    heat = config.attention.attn_temperature or {}
    return {"rope_parameters": {**scaling, **{key: heat[name] for name, key in _HEAT.items()}}}
