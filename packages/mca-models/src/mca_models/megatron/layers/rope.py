"""Rotary frequencies as ``transformers`` computes them, on Megatron's rotary module.

Megatron knows one scaling, Llama 3's, with fixed constants inside. Here the inverse frequencies come from the
model's own rope parameters: default, linear, dynamic, yarn, longrope and llama3.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_config.rope import require_rope
from mca_models.megatron.types import MegatronModule, Settings

Rope = Settings


def rotary_dim(config: McaModelConfig) -> int:
    """Channels of a head that are rotated."""
    if isinstance(config, MlaMcaModelConfig):
        return config.qk_pos_emb_head_dim
    return int(config.kv_channels * config.rotary_percent)


def inverse_frequencies(base: float, dim: int) -> Tensor:
    """``base ** (-2 i / dim)`` for i = 0 .. dim / 2 - 1."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return torch.pow(torch.tensor(base), exponents).reciprocal()


def _linear(config: McaModelConfig, rope: Rope) -> Tensor:
    slowed: Tensor = inverse_frequencies(config.rotary_base, rotary_dim(config)) / rope["factor"]
    return slowed


def _dynamic(config: McaModelConfig, rope: Rope) -> Tensor:
    return inverse_frequencies(config.rotary_base, rotary_dim(config))


def _llama3(config: McaModelConfig, rope: Rope) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between mixed."""
    frequencies = inverse_frequencies(config.rotary_base, rotary_dim(config))
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)  # how often each channel turns in the original context
    stretched = frequencies / rope["factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = (1 - share) * stretched + share * frequencies
    return mixed


def _yarn(config: McaModelConfig, rope: Rope) -> Tensor:
    """Channels that turn often keep their frequency, slow ones are stretched, a ramp between."""
    dim, base = rotary_dim(config), config.rotary_base
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings

    def channel(turns: float) -> float:
        """The channel that turns so often in the original context."""
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
    """Every channel has a factor of its own; these are those of sequences within the original context."""
    return inverse_frequencies(config.rotary_base, rotary_dim(config)) / torch.tensor(rope["short_factor"])


def _proportional(config: McaModelConfig, rope: Rope) -> Tensor:
    """All channels of a head are rotated, those beyond a share of them by nothing."""
    dim = config.kv_channels
    turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
    whole = inverse_frequencies(config.rotary_base, dim) / rope.get("factor", 1.0)
    return torch.where(torch.arange(dim // 2) < turning, whole, 0.0)


def yarn_factor(config: McaModelConfig, rope: Rope) -> float:
    """How many times longer the context is than the original one."""
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
    """The model's inverse frequencies, fp32 ``[rotary_dim / 2]``.

    Raises:
        McaError: The kind of scaling is not known, or lacks a parameter.
    """
    require_rope(config.rope_scaling)
    if config.rope_scaling is None:
        return inverse_frequencies(config.rotary_base, rotary_dim(config))
    return _KINDS[config.rope_scaling["rope_type"]](config, config.rope_scaling)


def attention_factor(config: McaModelConfig) -> float:
    """The factor on cosine and sine: 1 but for yarn and longrope."""
    rope = config.rope_scaling
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
    """Yarn's correction of magnitudes for a context ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_scale(config: McaModelConfig, rope: Rope) -> float:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def long_frequencies(config: McaModelConfig, length: int) -> Tensor:
    """Longrope's frequencies for sequences of ``length`` tokens beyond the original context."""
    factors = torch.tensor((config.rope_scaling or {})["long_factor"])
    return inverse_frequencies(config.rotary_base, rotary_dim(config)) / factors


def dynamic_frequencies(config: McaModelConfig, length: int) -> Tensor:
    """Dynamic scaling's frequencies for sequences of ``length`` tokens beyond the original context."""
    rope, dim, context = config.rope_scaling or {}, rotary_dim(config), config.max_position_embeddings
    stretch = rope["factor"] * length / context - (rope["factor"] - 1)
    return inverse_frequencies(config.rotary_base * stretch ** (dim / (dim - 2)), dim)


_LONGEST = "longest_sequence"

_BEYOND: dict[str, Callable[[McaModelConfig, int], Tensor]] = {
    "dynamic": dynamic_frequencies,
    "longrope": long_frequencies,
}


def length_dependent_ropes(*chunks: torch.nn.Module) -> tuple[MegatronModule, ...]:
    """The ropes in ``chunks`` whose frequencies depend on the longest sequence."""
    return tuple(module for chunk in chunks for module in chunk.modules() if hasattr(module, _LONGEST))


def set_longest_sequence(ropes: Iterable[MegatronModule], tokens: int) -> None:
    """Says how long the longest sequence of the coming pass is, which rows hide that are padded to another's length.

    Args:
        ropes: See `length_dependent_ropes`.
        tokens: Of that sequence; 0: as long as its row.
    """
    for rope in ropes:
        setattr(rope, _LONGEST, tokens)


def rotary_module(config: McaModelConfig, cp_group: ProcessGroup) -> torch.nn.Module:
    """Megatron's ``RotaryEmbedding`` with this model's frequencies."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    class ByLength(RotaryEmbedding):  # type: ignore[misc]
        """Frequencies that depend on the longest sequence, once it exceeds the original context."""

        longest_sequence = 0
        """Of the running pass, without padding; 0: as long as the row."""

        def forward(self, *args: object, **kwargs: object) -> Tensor:
            """See Megatron's, which keeps what it once computed for a length."""
            found: Tensor = RotaryEmbedding.forward.__wrapped__(self, *args, **kwargs)
            return found

        def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
            inv_freq, longest = self.inv_freq, self.longest_sequence or max_seq_len
            if longest > original:
                found = beyond(config, longest)  # which CUDA takes over at once: the host need not wait
                inv_freq = found.to(inv_freq, non_blocking=True) * sign
            positions = torch.arange(max_seq_len, device=inv_freq.device, dtype=inv_freq.dtype) + offset
            return torch.outer(positions, inv_freq)

    rope, sign = config.rope_scaling or {}, -1 if config.rotary_backwards else 1
    beyond = _BEYOND.get(rope.get("rope_type", "default"), dynamic_frequencies)
    longrope = rope.get("rope_type") == "longrope"
    original = rope["original_max_position_embeddings"] if longrope else config.max_position_embeddings
    rotary: MegatronModule = (ByLength if rope.get("rope_type") in _BEYOND else RotaryEmbedding)(
        kv_channels=config.kv_channels,
        rotary_percent=config.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        rotary_base=config.rotary_base,
        cp_group=cp_group,
    )
    rotary.inv_freq = frequencies(config).to(rotary.inv_freq) * sign
    module: torch.nn.Module = rotary
    return module
