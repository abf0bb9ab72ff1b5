"""Options of the losses of preference tuning: `PreferenceOptions` of pairs, `KtoOptions` of single answers.

``tasks`` imports them where a run has them: as dataclasses they would slow down each start of ``mca-train``.
"""

from dataclasses import dataclass
from typing import get_args

from mca_config.errors import McaError
from mca_train.losses.options import REFUSED, LossType

_REFERENCE_FREE = ("simpo", "orpo")
_SMOOTHED = ("sigmoid", "robust", "exo_pair")


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Options of the loss of preference pairs.

    Args:
        kind: ``dpo_loss``; `preference` lists the formulas.
        beta: Strength of the KL penalty; orpo: weight of the odds.
        label_smoothing: Assumed fraction of pairs in the wrong order (sigmoid, robust, exo_pair).
        simpo_gamma: Margin by which the chosen answer should be better (simpo).
        rpo_alpha: Weight of the chosen answer's cross entropy; None: not added.
    """

    kind: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float | None = None
    rpo_alpha: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossType):
            why = REFUSED.get(self.kind, f"expected {', '.join(get_args(LossType))}")
            raise McaError(f"dpo_loss is {self.kind!r}; {why}")
        if self.beta <= 0:
            raise McaError(f"dpo_beta is {self.beta}; expected a positive number")
        self._require_smoothing()
        if self.simpo_gamma is not None and self.kind != "simpo":
            raise McaError(f"simpo_gamma is for dpo_loss simpo, not {self.kind}; remove it")
        if self.rpo_alpha is not None and self.kind == "orpo":
            raise McaError(
                "rpo_alpha: dpo_loss orpo has the chosen answer's cross entropy already; remove it"
            )
        if self.rpo_alpha is not None and self.rpo_alpha < 0:
            raise McaError(f"rpo_alpha is {self.rpo_alpha}; expected 0 or more")

    def _require_smoothing(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise McaError(f"dpo_label_smoothing is {self.label_smoothing}; expected 0 or more and below 0.5")
        if self.label_smoothing and self.kind not in _SMOOTHED:
            raise McaError(
                f"dpo_label_smoothing is for dpo_loss {', '.join(_SMOOTHED)}, not {self.kind}; remove it"
            )
        if self.kind == "exo_pair" and not self.label_smoothing:
            raise McaError(
                "dpo_loss exo_pair needs dpo_label_smoothing above 0; set it, to 0.001 for example"
            )

    @property
    def needs_reference(self) -> bool:
        """Return True if the loss needs a reference model."""
        return self.kind not in _REFERENCE_FREE


@dataclass(frozen=True, kw_only=True)
class KtoOptions:
    """Options of the KTO loss.

    Args:
        beta: Strength of the KL penalty.
        desirable_weight: Weight of good answers.
        undesirable_weight: Weight of bad answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise McaError(f"kto_beta is {self.beta}; expected a positive number")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise McaError(f"{name} is {getattr(self, name)}; expected 0 or more")
