"""EXAONE 4: HF ``Exaone4ForCausalLM``: norms after each block; layers with a window rotate, others do not."""

from collections.abc import Sequence

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.dual_rope import FULL, SLIDING, write_layer_types


def pattern(hf: HfConfig) -> list[str]:
    """The kind of each layer from ``sliding_window_pattern``: ``"LLLG"`` or the step of full layers."""
    said = hf.get("sliding_window_pattern", 4)
    step = len(said) if isinstance(said, str) else said
    return [SLIDING if (i + 1) % step else FULL for i in range(hf["num_hidden_layers"])]


def derive(hf: HfConfig) -> JsonObject:
    """Windows and ropes: a model without a window rotates in every layer."""
    window = hf.get("sliding_window")
    if window is None:
        return {"window_size": None, "layer_types": None, "no_rope_freq": None}
    return {"window_size": window, **rotated_windows(hf.get("layer_types") or pattern(hf))}


def rotated_windows(kinds: Sequence[str]) -> JsonObject:
    """Layers of ``kinds``, of which those with a window rotate."""
    return {"layer_types": tuple(kinds), "no_rope_freq": tuple(int(kind == FULL) for kind in kinds)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"sliding_window": values["window_size"], **write_layer_types(values)}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"sliding_window": 4096},
    constants={"norm_placement": "post", "qk_layernorm": True},
    fixed=(SILU,),
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="exaone4", architecture="Exaone4ForCausalLM", config=CONFIG, params=dense_layers)
