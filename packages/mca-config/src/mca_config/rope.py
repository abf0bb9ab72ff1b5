"""Supported RoPE scaling types and their required parameters.

`mca_models.megatron.layers.rope` computes the frequencies.
"""

import math
from collections.abc import Iterator, Mapping

from mca_config.errors import McaError
from mca_config.types import Values

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


def require_rope(scaling: Values | None) -> None:
    """Check that a RoPE scaling is supported and complete.

    Args:
        scaling: ``McaModelConfig.rope_scaling``.

    Raises:
        McaError: Its type is unknown, or a parameter is missing or not a positive number.
    """
    if problems := [] if scaling is None else list(_problems(scaling)):
        raise McaError(f"rope parameters: {'; '.join(problems)}")


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
