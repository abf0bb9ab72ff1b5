"""M-RoPE: some channels follow a token's time, others its row or its column in an image.

`images` sets the positions of a micro-batch; without them all channels follow one position, and the plain RoPE
computes them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.rope import set_rotary
from mca_models.megatron.layers.rope import frequencies, rotary_module
from mca_models.megatron.types import MegatronConfig, MegatronModule


def mrope_axes(sections: tuple[int, ...], channels: int, *, interleaved: bool) -> Tensor:
    """Return which of the three positions each rotated pair of channels follows.

    Args:
        sections: Number of pairs that follow each position.
        channels: Number of pairs.
        interleaved: The axes alternate within their sections; remaining pairs follow the first.
    """
    axes = torch.zeros(channels, dtype=torch.long)
    if interleaved:
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes
    start = 0
    for number, length in enumerate(sections):
        axes[start : start + length] = number % 3
        start += length
    return axes


class MRope(torch.nn.Module):
    """Megatron's rotary module, extended by positions on three axes.

    Attributes:
        positions: ``[3, b, s]`` of this rank's tokens, or ``[3, 1, t]`` of a full pack, for the next forward pass.
            Megatron shards the angles of a pack over context ranks.
    """

    def __init__(self, config: McaModelConfig, cp_group: ProcessGroup) -> None:
        super().__init__()
        plain: MegatronModule = rotary_module(config, cp_group)
        inverse = frequencies(config)
        axes = mrope_axes(
            given(config.mrope).mrope_section, len(inverse), interleaved=given(config.mrope).mrope_interleaved
        )
        self.plain = plain
        self.inverse: Tensor
        self.axes: Tensor
        self.register_buffer("inverse", inverse.to(plain.inv_freq.device), persistent=False)
        self.register_buffer("axes", axes.to(plain.inv_freq.device), persistent=False)
        self.pairs = config.rope.rotary_interleaved
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Return the sequence length, as Megatron's ``RotaryEmbedding`` does."""
        plain: MegatronModule = self.plain
        length: int = plain.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return angles ``[s, b, 1, channels]``, or ``[s, 1, 1, channels]`` without positions."""
        positions, self.positions = self.positions, None
        if positions is None:
            plain: Tensor = self.plain(*args, **kwargs)
            return plain
        angles = positions.float()[self.axes].permute(2, 1, 0) * self.inverse  # [s, b, channels / 2]
        both = angles.repeat_interleave(2, -1) if self.pairs else torch.cat([angles, angles], -1)
        return both.unsqueeze(2)


def position_problems(config: McaModelConfig, megatron: MegatronConfig) -> Iterator[str]:
    """Yield why positions on three axes cannot be computed."""
    if megatron.apply_rope_fusion and config.mrope is not None:
        yield "apply_rope_fusion has one position for each token, images have three; remove it"


MROPE = Feature(
    name="M-RoPE",
    enabled=lambda config: config.mrope is not None and config.rope.rotary_base_local is None,
    finish=lambda model, config: set_rotary(model, config, MRope),
)
