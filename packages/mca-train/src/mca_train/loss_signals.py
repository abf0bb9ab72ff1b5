"""Numbers beside the loss: of a custom loss, of experts' load balancing, of prediction layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_train import groups


class Signals:
    """Means of named numbers between two logs, over all ranks that compute the loss.

    Ranks talk only in `flush`, which all call at the same step.

    Args:
        names: In the order of the log, the same on every rank.
        device: Where sums are kept.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self._sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, sums: Mapping[str, Tensor], count: Tensor | float) -> None:
        """Sums of this rank by name, each over ``count`` things."""
        values = torch.stack([sums[name].detach().double() for name in self.names])
        self._sums[:, 0] += values
        self._sums[:, 1] += count

    def flush(self) -> dict[str, float]:
        """The means, and begins anew."""
        if not self.names:
            return {}
        total = groups.sum_over_data(self._sums)
        self._sums.zero_()
        values = (total[:, 0] / total[:, 1].clamp(min=1e-12)).tolist()
        return dict(zip(self.names, values, strict=True))


class ModelLosses:
    """What Megatron's layers add to the gradients without showing it in the loss.

    ``moe_load_balancing_loss`` (and ``moe_z_loss``, ...) is the mean over layers and micro-batches, without its
    coefficient; ``mtp_<depth>_loss`` is the mean cross entropy of a prediction layer.

    Args:
        megatron: The model's ``TransformerConfig``.
        config: The model.
    """

    def __init__(self, megatron: Any, config: McaModelConfig) -> None:
        self._prediction = int(megatron.mtp_num_layers or 0)
        moe = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
        self._moe_layers = sum(moe) + (self._prediction if moe[-1] else 0)
        self._micro_batches = 0

    def add(self, micro_batches: int) -> None:
        """A step of so many micro-batches on each data-parallel rank was trained."""
        self._micro_batches += micro_batches

    def flush(self) -> dict[str, float]:
        """Means since the last time. All ranks call this at the same step."""
        count, self._micro_batches = max(self._micro_batches, 1), 0
        found = self._of_experts(count) if self._moe_layers else {}
        return found | (self._of_prediction(count) if self._prediction else {})

    def _of_experts(self, count: int) -> dict[str, float]:
        stage: dict[str, float] = {}
        for name, entry in sorted(_expert_losses().items()):
            stage[name] = groups.balancing_loss(entry["values"].sum().double(), entry)
            entry["values"].zero_()
        whole: dict[str, float] = {}
        for part in groups.of_every_stage(stage):
            for name, value in part.items():
                whole[f"moe_{name}"] = whole.get(f"moe_{name}", 0.0) + value / (count * self._moe_layers)
        return whole

    def _of_prediction(self, count: int) -> dict[str, float]:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        tracker = MTPLossLoggingHelper.tracker
        own = tracker.get("values", tracker.get("loss_values"))  # the older and the newer megatron-core's
        values = torch.zeros(self._prediction, device=platform.current_device()) if own is None else own
        means = groups.sum_over_data(values.double()) / groups.data_group_with_context().size()
        if own is not None:
            own.zero_()
        return {f"mtp_{depth + 1}_loss": float(value) / count for depth, value in enumerate(means)}


def _expert_losses() -> dict[str, Any]:
    """Megatron's collected auxiliary losses by name, with the groups that they are to be reduced over."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # megatron-core 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return dict(get_moe_layer_wise_logging_tracker())
    return {name: vars(entry) for name, entry in get_moe_metrics_tracker().metrics.items()}
