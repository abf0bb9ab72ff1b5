"""Ropes of ``config.json`` that need more than `config_table.read_rope`, also by kind of layer."""

from collections.abc import Callable

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ORIGINAL, Fixed, HfConfig, Lens, head_dim, read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FULL, SLIDING = "full_attention", "sliding_attention"
PER_LAYER_TYPE = Fixed("rope_scaling", (None, {}), "'rope_parameters' has separate RoPE for each layer type")


def long_rope(hf: HfConfig) -> JsonObject:
    """The rope, its scaling by its present name and with the original context, which HF keeps outside of it."""
    rope = read_rope(hf)
    if rope["rope_scaling"] is not None:
        kind = rope["rope_scaling"]["rope_type"]
        rope["rope_scaling"] |= {"rope_type": "longrope" if kind in ("su", "yarn") else kind}
        inside = rope["rope_scaling"].get(ORIGINAL)
        rope["rope_scaling"][ORIGINAL] = hf.get(ORIGINAL) or inside or hf["max_position_embeddings"]
    return rope


def alpha_rope(hf: HfConfig) -> JsonObject:
    """Derive RoPE; a dynamic one with an ``alpha`` is an unscaled one with a larger base at any length."""
    rope, dim = read_rope(hf), hf.get("head_dim") or head_dim(hf)
    scaling = rope["rope_scaling"] or {}
    if scaling.get("rope_type") == "dynamic" and scaling.get("alpha"):
        base = rope["rotary_base"] * scaling["alpha"] ** (dim / (dim - 2))
        return {**rope, "rotary_base": base, "rope_scaling": None}
    return rope


def require_truncate(full: HfConfig) -> None:
    """Reject a correction range that is not rounded, in the rope of full layers."""
    key = "rope_parameters.full_attention.truncate"
    whole = Fixed(key, (True,), "transformers reads it only where all layers have the same rope")
    whole.check({key: full.get("truncate", True)})


def derive_dual_rope(hf: HfConfig, base: float, local_base: float) -> JsonObject:
    """Return the ropes of full and sliding-window layers, from the keys of transformers 5 or (full layers) 4.

    Args:
        hf: ``config.json``.
        base: Base of full layers without a ``rope_theta``.
        local_base: Base of sliding-window layers without one.
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
    require_truncate(full)
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
