"""EXAONE 4: HF ``Exaone4ForCausalLM``: norms after each block; layers with a window rotate, others do not."""

from collections.abc import Sequence

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.dual_rope import FULL, SLIDING, restore_layer_types
from mca_models.templates.family import Family


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


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"sliding_window": config.attention.window_size, **restore_layer_types(config)}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"sliding_window": 4096},
    constants={"norm_placement": "post", "qk_layernorm": True},
    fixed=(SILU,),
    derive=derive,
    restore=restore,
)

FAMILY = Family(model_type="exaone4", architecture="Exaone4ForCausalLM", config=CONFIG, params=dense_layers)
