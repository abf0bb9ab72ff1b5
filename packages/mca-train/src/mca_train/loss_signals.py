"""Numbers beside the loss: of a custom loss, of experts' load balancing, of prediction layers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_train import groups
from mca_train.step_rows import StepRows


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
        self._steps = StepRows(2 * len(names))

    def add(self, sums: Mapping[str, Tensor], count: Tensor | float) -> None:
        """Sums of this rank by name, each over ``count`` things."""
        values = torch.stack([sums[name].detach().double() for name in self.names])
        self._sums[:, 0] += values
        self._sums[:, 1] += count

    def end_step(self) -> None:
        """What was added belongs to one step."""
        if self.names:
            self._steps.add(self._sums.flatten())
            self._sums = torch.zeros_like(self._sums)

    def flush(self) -> dict[str, float]:
        """The means, and begins anew."""
        if not self.names:
            return {}
        self.end_step()
        total = self._steps.flush(groups.sum_over_data).sum(0).reshape(-1, 2)
        values = (total[:, 0] / total[:, 1].clamp(min=1e-12)).tolist()
        return dict(zip(self.names, values, strict=True))

    def state(self) -> list[list[float]]:
        """The sums of every step since the last log, for a checkpoint; collective."""
        return self._steps.of_all_ranks(groups.sum_over_data).tolist() if self.names else []

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Goes on from `state`, on whatever layout it was made."""
        self._steps.restore(state)


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
        self._before: dict[str, list[float]] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, StepRows] = {}
        self._depths = StepRows(self._prediction)

    def add(self, micro_batches: int) -> None:
        """A step of so many micro-batches on each data-parallel rank was trained."""
        self._micro_batches += micro_batches * groups.num_replicas()
        for name, entry in _expert_losses().items() if self._moe_layers else ():
            self._entries[name] = entry
            self._rows.setdefault(name, StepRows(1)).add(entry["values"].sum().reshape(1))
            entry["values"].zero_()
        if self._prediction:
            own = _prediction_losses()
            self._depths.add(
                torch.zeros(self._prediction, device=platform.current_device()) if own is None else own
            )
            if own is not None:
                own.zero_()

    def flush(self) -> dict[str, float]:
        """Means since the last time. All ranks call this at the same step."""
        found = self.state()
        count = max(found["micro_batches"], 1)
        self._micro_batches, self._before, self._rows = 0, {}, {}
        self._depths = StepRows(self._prediction)
        means = {
            f"moe_{name}": sum(values) / (count * self._moe_layers)
            for name, values in found["experts"].items()
        }
        by_depth = zip(*found["depths"], strict=True)
        return means | {f"mtp_{n}_loss": sum(values) / count for n, values in enumerate(by_depth, 1)}

    def state(self) -> dict[str, Any]:
        """What was collected since the last log, over all ranks, for a checkpoint; collective."""
        return {
            "micro_batches": self._micro_batches,
            "experts": self._experts() if self._moe_layers else {},
            "depths": self._depths.of_all_ranks(_sum_of_prediction).tolist() if self._prediction else [],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, on whatever layout it was made."""
        self._micro_batches, self._before, self._rows = (
            int(state["micro_batches"]),
            dict(state["experts"]),
            {},
        )
        self._depths.restore(state["depths"])

    def _experts(self) -> dict[str, list[float]]:
        """Sums over layers, replicas and micro-batches of each step, by name."""
        stage = {
            name: rows.of_all_ranks(partial(_sum_of_balancing, self._entries[name])).flatten().tolist()
            for name, rows in sorted(self._rows.items())
        }
        whole: dict[str, list[float]] = {}
        for part in groups.of_every_stage(stage):
            for name, values in part.items():
                known = whole.get(name, [0.0] * len(values))
                whole[name] = [a + b for a, b in zip(known, values, strict=True)]
        names = sorted(self._before.keys() | whole.keys())
        return {name: [*self._before.get(name, []), *whole.get(name, [])] for name in names}


def _sum_of_balancing(entry: dict[str, Any], rows: Tensor) -> Tensor:
    total: Tensor = groups.balancing_loss(rows.clone(), entry) * groups.num_replicas()
    return total


def _sum_of_prediction(rows: Tensor) -> Tensor:
    total: Tensor = groups.sum_over_data(rows) / groups.data_group_with_context().size()
    return total * groups.num_replicas()


def _prediction_losses() -> Tensor | None:
    """What Megatron's prediction layers of this rank collected, by depth."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    older: Tensor | None = tracker.get("values")  # of megatron-core 0.16
    return tracker.get("loss_values") if older is None else older


def _expert_losses() -> dict[str, Any]:
    """Megatron's collected auxiliary losses by name, with the groups that they are to be reduced over."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # megatron-core 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return dict(get_moe_layer_wise_logging_tracker())
    return {name: vars(entry) for name, entry in get_moe_metrics_tracker().metrics.items()}
