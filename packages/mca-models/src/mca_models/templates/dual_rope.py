"""A rope for layers that see everything, and one for those with a sliding window.

The layers that use them are built in `mca_models.megatron.families.dual_rope`.
"""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import Fixed, HfConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
PER_LAYER_TYPE = Fixed("rope_scaling", (None, {}), "'rope_parameters' has a rope for each kind of layer")


def derive_dual_rope(hf: HfConfig, base: float, local_base: float) -> JsonObject:
    """Both ropes, from transformers 5's parameters by kind of layer, or those of full layers from 4's keys.

    Args:
        hf: ``config.json``.
        base: Of full layers, if it says none.
        local_base: Of layers with a window, if it says none.
    """
    rope = dict(hf.get("rope_parameters") or {})
    full = {**(rope.get(FULL) or {"rope_type": "default"}), **(hf.get("rope_scaling") or {})}
    local = rope.get(SLIDING) or {}
    whole = read_rope({"rope_theta": base, "rope_parameters": full})
    sliding = read_rope({"rope_theta": local_base, "rope_parameters": local})
    if sliding["rope_scaling"] is not None or sliding["rotary_percent"] != 1.0:
        Fixed("rope_parameters.sliding_attention", ({},), "layers with a window have an unscaled rope").check(
            {"rope_parameters.sliding_attention": local}
        )
    return {**whole, "rotary_base_local": sliding["rotary_base"]}


def restore_dual_rope(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    full = {"rope_theta": config.rope.rotary_base, "rope_type": "default", **(config.rope.rope_scaling or {})}
    local = {"rope_theta": config.rope.rotary_base_local, "rope_type": "default"}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def restore_layer_types(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"layer_types": list(config.layer_types)} if config.layer_types else {}
