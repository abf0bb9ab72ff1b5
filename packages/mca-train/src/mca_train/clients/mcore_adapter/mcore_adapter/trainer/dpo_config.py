"""What ``mcore_adapter``'s DPO trainer is told of its loss."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class DPOConfig:
    """Loss of preference pairs.

    Args:
        beta: Weight of the KL penalty.
        pref_loss: LLaMA-Factory's name of the loss.
        label_smoothing: Share of pairs taken to be labelled the wrong way round.
    """

    beta: float = 0.1
    pref_loss: str = "sigmoid"
    label_smoothing: float = 0.0
