"""Sliding-window attention: the window and the layers that have it."""

from collections.abc import Sequence

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Field, HfConfig, Lens
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types


def window_pattern(hf: HfConfig) -> list[str]:
    """The kind of each layer from ``sliding_window_pattern``: ``"LLLG"`` or the step of full layers."""
    said = hf.get("sliding_window_pattern", 4)
    step = len(said) if isinstance(said, str) else said
    return [SLIDING if (i + 1) % step else FULL for i in range(hf["num_hidden_layers"])]


def derive_rotated_windows(hf: HfConfig) -> JsonObject:
    """Windows and ropes: a model without a window rotates in every layer."""
    window = hf.get("sliding_window")
    if window is None:
        return {"window_size": None, "layer_types": None, "no_rope_freq": None}
    return {"window_size": window, **rotated_windows(hf.get("layer_types") or window_pattern(hf))}


def rotated_windows(kinds: Sequence[str]) -> JsonObject:
    """Layers of ``kinds``, of which those with a window rotate."""
    return {"layer_types": tuple(kinds), "no_rope_freq": tuple(int(kind == FULL) for kind in kinds)}


def write_rotated_windows(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"sliding_window": values["window_size"], **write_layer_types(values)}


def window(hf: JsonObject) -> JsonObject:
    """The sliding window, which only layers from ``max_window_layers`` on have, and only if switched on."""
    if not hf.get("use_sliding_window"):
        return {"window_size": None, "layer_types": None}
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [FULL if i < first else SLIDING for i in range(hf["num_hidden_layers"])]
    return {"window_size": hf.get("sliding_window", 4096), "layer_types": tuple(kinds)}


def write_window(values: Values) -> JsonObject:
    """Write the HF keys."""
    if values["window_size"] is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": values["window_size"], **write_layer_types(values)}


WINDOW = Field("window_size", "sliding_window", 128)


def _read_listed_windows(hf: HfConfig) -> JsonObject:
    if hf.get("sliding_window") is None:
        return {"layer_types": None}
    return {"layer_types": tuple(hf.get("layer_types") or [SLIDING] * hf["num_hidden_layers"])}


LISTED_WINDOWS = Lens(_read_listed_windows, write_layer_types)
"""The sliding-window layers: all unless listed."""


SWITCHED_WINDOW = Lens(window, write_window)
ROTATED_WINDOWS = Lens(derive_rotated_windows, write_rotated_windows)
