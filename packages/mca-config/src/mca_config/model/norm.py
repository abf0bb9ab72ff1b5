"""Layer norms."""

from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import NotNegative, Section


@dataclass(frozen=True, kw_only=True)
class Norm(Section):
    """Kind and position of layer norms."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: NotNegative = 1e-6
    layernorm_zero_centered_gamma: bool = False
    norm_weight: bool = True
    """Layer norms and the final norm have weights."""
    norm_bias: bool = True
    """LayerNorms have biases too."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP, after them (before the residual is added), or both."""
