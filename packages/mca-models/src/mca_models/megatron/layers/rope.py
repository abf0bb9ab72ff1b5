"""Rotary frequencies as in ``transformers``, on Megatron's rotary module.

Megatron supports one scaling, Llama 3's, with fixed constants. Here the inverse frequencies come from the model's RoPE
parameters: default, linear, dynamic, yarn, longrope, proportional and llama3.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import MegatronModule, Settings

Rope = Settings


def rotary_dim(config: McaModelConfig) -> int:
    """Return the number of rotated channels of a head."""
    return config.rotated_channels


def inverse_frequencies(base: float, dim: int) -> Tensor:
    """Return ``base ** (-2 i / dim)`` for i = 0 .. dim / 2 - 1."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return torch.pow(torch.tensor(base), exponents).reciprocal()


def _linear(config: McaModelConfig, rope: Rope) -> Tensor:
    stretched: Tensor = inverse_frequencies(config.rope.rotary_base, rotary_dim(config)) / rope["factor"]
    return stretched


def _dynamic(config: McaModelConfig, rope: Rope) -> Tensor:
    return inverse_frequencies(config.rope.rotary_base, rotary_dim(config))


def _llama3(config: McaModelConfig, rope: Rope) -> Tensor:
    """Stretch long wavelengths, keep short ones, mix those between."""
    frequencies = inverse_frequencies(config.rope.rotary_base, rotary_dim(config))
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)  # turns of each channel in the original context
    stretched = frequencies / rope["factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = (1 - share) * stretched + share * frequencies
    return mixed


def _yarn(config: McaModelConfig, rope: Rope) -> Tensor:
    """Keep the frequency of fast channels, stretch slow ones, with a ramp between."""
    dim, base = rotary_dim(config), config.rope.rotary_base
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings

    def channel(turns: float) -> float:
        """Return the channel that makes ``turns`` turns in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched_share = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = inverse_frequencies(base, dim)
    return frequencies / yarn_factor(config, rope) * stretched_share + frequencies * (1 - stretched_share)


def _longrope(config: McaModelConfig, rope: Rope) -> Tensor:
    """Apply the per-channel factors of sequences within the original context."""
    return inverse_frequencies(config.rope.rotary_base, rotary_dim(config)) / torch.tensor(
        rope["short_factor"]
    )


def _proportional(config: McaModelConfig, rope: Rope) -> Tensor:
    """Rotate a share of the channels; the frequencies of the others are 0."""
    dim = config.attention.kv_channels
    rotated = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
    whole = inverse_frequencies(config.rope.rotary_base, dim) / rope.get("factor", 1.0)
    return torch.where(torch.arange(dim // 2) < rotated, whole, 0.0)


def yarn_factor(config: McaModelConfig, rope: Rope) -> float:
    """Return the ratio of the context to the original context."""
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return float(rope.get("factor") or config.max_position_embeddings / original)


_KINDS: dict[str, Callable[[McaModelConfig, Rope], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def frequencies(config: McaModelConfig) -> Tensor:
    """Return the model's inverse frequencies, fp32 ``[rotary_dim / 2]``.

    Raises:
        McaError: The ``rope_type`` is unknown, or lacks a parameter.
    """
    if config.rope.rope_scaling is None:
        return inverse_frequencies(config.rope.rotary_base, rotary_dim(config))
    return _KINDS[config.rope.rope_scaling["rope_type"]](config, config.rope.rope_scaling)


def attention_factor(config: McaModelConfig) -> float:
    """Return the factor on cosine and sine: 1 except for yarn and longrope."""
    rope = config.rope.rope_scaling
    if rope is None or rope.get("rope_type") not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope["rope_type"] == "longrope":
        return _longrope_scale(config, rope)
    factor = yarn_factor(config, rope)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """Return yarn's magnitude correction for a context ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_scale(config: McaModelConfig, rope: Rope) -> float:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def long_frequencies(config: McaModelConfig, length: int) -> Tensor:
    """Return longrope's frequencies for sequences of ``length`` tokens beyond the original context."""
    factors = torch.tensor((config.rope.rope_scaling or {})["long_factor"])
    return inverse_frequencies(config.rope.rotary_base, rotary_dim(config)) / factors


def dynamic_frequencies(config: McaModelConfig, length: int) -> Tensor:
    """Return dynamic scaling's frequencies for ``length`` tokens beyond the original context."""
    rope, dim, context = config.rope.rope_scaling or {}, rotary_dim(config), config.max_position_embeddings
    stretch = rope["factor"] * length / context - (rope["factor"] - 1)
    return inverse_frequencies(config.rope.rotary_base * stretch ** (dim / (dim - 2)), dim)


_LONGEST = "longest_sequence"

_BEYOND: dict[str, Callable[[McaModelConfig, int], Tensor]] = {
    "dynamic": dynamic_frequencies,
    "longrope": long_frequencies,
}
LENGTH_DEPENDENT = frozenset(_BEYOND)
"""RoPE types whose frequencies depend on the longest sequence of a pass."""


def length_dependent_ropes(*chunks: torch.nn.Module) -> tuple[MegatronModule, ...]:
    """Return the RoPE modules in ``chunks`` whose frequencies depend on the longest sequence."""
    return tuple(module for chunk in chunks for module in chunk.modules() if hasattr(module, _LONGEST))


def set_longest_sequence(ropes: Iterable[MegatronModule], tokens: int) -> None:
    """Set the longest sequence of the next pass, which padded rows hide.

    Args:
        ropes: Modules from `length_dependent_ropes`.
        tokens: Tokens of that sequence; 0: as long as its row.
    """
    for rope in ropes:
        setattr(rope, _LONGEST, tokens)


def rotary_module(config: McaModelConfig, cp_group: ProcessGroup) -> torch.nn.Module:
    """Return Megatron's ``RotaryEmbedding`` with this model's frequencies."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    class LengthDependentRope(RotaryEmbedding):  # type: ignore[misc]
        """RoPE whose frequencies depend on the longest sequence beyond the original context."""

        longest_sequence = 0
        """Longest sequence of the running pass, without padding; 0: as long as the row."""

        def forward(self, *args: object, **kwargs: object) -> Tensor:
            """Compute the angles without Megatron's cache by length."""
            angles: Tensor = RotaryEmbedding.forward.__wrapped__(self, *args, **kwargs)
            return angles

        def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
            inv_freq, longest = self.inv_freq, self.longest_sequence or max_seq_len
            if longest > original:
                scaled = beyond(config, longest)  # a non-blocking copy: the host does not wait
                inv_freq = scaled.to(inv_freq, non_blocking=True) * sign
            positions = torch.arange(max_seq_len, device=inv_freq.device, dtype=inv_freq.dtype) + offset
            return torch.outer(positions, inv_freq)

    rope, sign = config.rope.rope_scaling or {}, -1 if config.rope.rotary_backwards else 1
    beyond = _BEYOND.get(rope.get("rope_type", "default"), dynamic_frequencies)
    longrope = rope.get("rope_type") == "longrope"
    original = rope["original_max_position_embeddings"] if longrope else config.max_position_embeddings
    rotary: MegatronModule = (LengthDependentRope if rope.get("rope_type") in _BEYOND else RotaryEmbedding)(
        kv_channels=config.attention.kv_channels,
        rotary_percent=config.rope.rotary_percent,
        rotary_interleaved=config.rope.rotary_interleaved,
        rotary_base=config.rope.rotary_base,
        cp_group=cp_group,
    )
    rotary.inv_freq = frequencies(config).to(rotary.inv_freq) * sign
    module: torch.nn.Module = rotary
    return module
