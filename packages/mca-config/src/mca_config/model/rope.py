"""Rotary position embeddings (RoPE), with the supported scaling types and their required parameters.

`mca_models.megatron.layers.rope` computes the frequencies.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mca_config.model.section import ModelSizes, Positive, Section, require_entries
from mca_config.types import JsonObject, Values

NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "proportional": (),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Required parameters of each ``rope_type`` of HF."""
_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True, kw_only=True)
class Rope(Section):
    """Frequencies of RoPE, and the layers that have it."""

    rotary_base: Positive = 10000.0
    rotary_percent: Positive = 1.0
    rotary_interleaved: bool = False
    rotary_backwards: bool = False
    """RoPE rotates pairs of channels by negative angles."""
    rope_scaling: JsonObject | None = None
    """HF's RoPE parameters without ``rope_theta`` (``rope_type``, ``factor``, ...); None: unscaled."""
    rotary_base_local: Positive | None = None
    """Base of the unscaled RoPE of ``sliding_attention`` layers; None: all layers use the same RoPE."""
    no_rope_freq: tuple[int, ...] | None = None
    """1 for each decoder layer without RoPE, 0 for one with; None: all layers have RoPE."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield an unsupported or incomplete scaling, and lists of a wrong length."""
        yield from require_entries("no_rope_freq", self.no_rope_freq, model.num_layers)
        scaling = self.rope_scaling or {}
        if wrong := "; ".join([] if self.rope_scaling is None else _problems(scaling)):
            yield f"rope parameters: {wrong}"
            return
        rotated = model.rotated_channels
        for name in _LISTS:
            factors = scaling.get(name)
            if factors is not None and len(factors) != rotated // 2:
                yield (
                    f"rope parameters: {name} has {len(factors)} numbers, expected {rotated // 2}, one for each pair "
                    "of rotated channels"
                )


@dataclass(frozen=True, kw_only=True)
class MRope(Section):
    """Channels of each position of a token."""

    mrope_section: tuple[int, ...]
    """Numbers of rotated channel pairs for the time, row and column of a token."""
    mrope_interleaved: bool = False
    """Channel pairs of time, row and column alternate instead of forming three blocks."""


def _problems(scaling: Values) -> Iterator[str]:
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in NEEDED:
        yield f"rope_type {kind!r:.80} is not supported; supported: default, {', '.join(NEEDED)}"
        return
    missing = [name for name in NEEDED[kind] if scaling.get(name) is None]
    if missing:
        yield f"rope_type {kind!r} needs {', '.join(missing)}"
    for name in _NUMBERS:
        if scaling.get(name) is not None and not _is_positive(scaling[name]):
            yield f"{name} must be a positive number, not {scaling[name]!r:.80}"
    for name in _LISTS:
        values = scaling.get(name)
        if values is not None and not (isinstance(values, list | tuple) and all(map(_is_positive, values))):
            yield f"{name} must be a list of positive numbers, not {values!r:.80}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
