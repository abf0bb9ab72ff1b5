"""A rope for layers that see everything, and one for those with a sliding window.

The layers that use them are built in `mca_models.megatron.features.rope`.
"""

from collections.abc import Callable

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Fixed, HfConfig, read_rope
from mca_models.templates.lens import Lens

FULL, SLIDING = "full_attention", "sliding_attention"
PER_LAYER_TYPE = Fixed("rope_scaling", (None, {}), "'rope_parameters' has separate RoPE for each layer type")


def derive_dual_rope(hf: HfConfig, base: float, local_base: float) -> JsonObject:
    """Both ropes, from transformers 5's parameters by kind of layer, or those of full layers from 4's keys.

    Args:
        hf: ``config.json``.
        base: Of full layers, if it says none.
        local_base: Of sliding-window layers, if it says none.
    """
    rope = dict(hf.get("rope_parameters") or {})
    full = {**(rope.get(FULL) or {"rope_type": "default"}), **(hf.get("rope_scaling") or {})}
    local = rope.get(SLIDING) or {}
    whole = read_rope({"rope_theta": base, "rope_parameters": full})
    sliding = read_rope({"rope_theta": local_base, "rope_parameters": local})
    if sliding["rope_scaling"] is not None or sliding["rotary_percent"] != 1.0:
        Fixed(
            "rope_parameters.sliding_attention", ({},), "sliding-window layers have an unscaled rope"
        ).check({"rope_parameters.sliding_attention": local})
    return {**whole, "rotary_base_local": sliding["rotary_base"]}


def write_dual_rope(values: Values) -> HfConfig:
    """Write the HF keys."""
    full = {"rope_theta": values["rotary_base"], "rope_type": "default", **(values["rope_scaling"] or {})}
    local = {"rope_theta": values["rotary_base_local"], "rope_type": "default"}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def write_layer_types(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"layer_types": list(values["layer_types"])} if values["layer_types"] else {}


def layer_types(is_full: Callable[[int], bool]) -> Lens:
    """Return the lens of ``layer_types``; without it ``is_full`` says which layers have no window."""

    def read(hf: HfConfig) -> JsonObject:
        pattern = [FULL if is_full(layer) else SLIDING for layer in range(hf["num_hidden_layers"])]
        return {"layer_types": tuple(hf.get("layer_types") or pattern)}

    return Lens(read, write_layer_types)
