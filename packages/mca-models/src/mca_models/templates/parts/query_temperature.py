"""A rope whose parameters also say how queries beyond the first context grow with their position."""

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ORIGINAL, HfConfig, read_rope
from mca_models.templates.lens import Lens

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


def write_query_temperature(values: Values) -> HfConfig:
    """Write the HF keys."""
    scaling = {"rope_theta": values["rotary_base"], "rope_type": "default", **(values["rope_scaling"] or {})}
    heat = values["attn_temperature"] or {}
    return {"rope_parameters": {**scaling, **{key: heat[name] for name, key in _HEAT.items()}}}


YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0},
    "llama_4_scaling_beta": 0.1,
}
"""Default of transformers where ``config.json`` has no rope."""


def query_temperature(default: JsonObject) -> Lens:
    """Return the lens of a rope with a query temperature; ``default`` are its parameters without a named rope."""
    return Lens(lambda hf: derive_query_temperature(hf, default), write_query_temperature)
