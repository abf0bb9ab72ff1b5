"""M-RoPE: rotary positions in time, row and column."""

from dataclasses import dataclass

from mca_config.model.section import Section


@dataclass(frozen=True, kw_only=True)
class MRope(Section):
    """Channels of each position of a token."""

    mrope_section: tuple[int, ...]
    """Numbers of rotated channel pairs for the time, row and column of a token."""
    mrope_interleaved: bool = False
    """Channel pairs of time, row and column alternate instead of forming three blocks."""
