"""Ropes of ``config.json`` that need more than `config_table.read_rope`."""

from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    ORIGINAL,
    HfConfig,
    head_dim,
    read_rope,
)

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
