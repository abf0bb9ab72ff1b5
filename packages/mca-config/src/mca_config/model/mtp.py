"""Multi-token prediction (MTP)."""

from dataclasses import dataclass
from typing import Annotated

from mca_config.model.section import Range, Section


@dataclass(frozen=True, kw_only=True)
class Mtp(Section):
    """MTP layers, which follow the decoder layers."""

    mtp_num_layers: Annotated[int, Range(least=0, most=100)] = 0
    mtp_before_final_norm: bool = False
    """MTP layers take the output of the last decoder layer without the final norm."""
