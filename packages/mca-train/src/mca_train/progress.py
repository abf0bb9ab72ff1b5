"""The arithmetic of a run (epochs and steps) and the losses between two logs."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from mca_train import groups
from mca_train.losses import StepLoss


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    steps_per_epoch: int
    max_steps: int

    @classmethod
    def of(cls, args: Any, steps_per_epoch: int) -> "Length":
        """From ``max_steps``, or from ``num_train_epochs`` where that is not set, as in Hugging Face."""
        if args.max_steps > 0:
            return cls(steps_per_epoch, args.max_steps)
        return cls(steps_per_epoch, max(math.ceil(args.num_train_epochs * steps_per_epoch), 1))

    @property
    def num_epochs(self) -> int:
        """Epochs begun."""
        return math.ceil(self.max_steps / self.steps_per_epoch)


@dataclass
class LossMeter:
    """Collects the steps' losses; ranks talk only when a log is due.

    The loss of a log is the mean of its steps' losses, each a mean over all targets of the global batch.
    """

    context_parallel_rank: int
    _steps: list[torch.Tensor] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def add(self, loss: StepLoss, num_tokens: int, num_samples: int) -> None:
        """One step of this rank. Ranks that share samples count them once."""
        alone = self.context_parallel_rank == 0
        device = loss.loss_sum.device
        counts = torch.tensor([num_tokens * alone, num_samples * alone], dtype=torch.float64, device=device)
        self._steps.append(torch.cat([loss.loss_sum[None], loss.targets[None], counts]))

    def flush(self) -> "LossReport":
        """Sums over all ranks, and begins anew. Every rank calls this at the same step."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        steps = groups.sum_over_data(torch.stack(self._steps)) if self._steps else torch.zeros(0, 4)
        self._steps = []
        losses = steps[:, 0] / steps[:, 1].clamp(min=1)
        return LossReport(
            losses=losses.tolist(),
            loss_sum=float(steps[:, 0].sum()),
            num_targets=int(steps[:, 1].sum()),
            num_tokens=int(steps[:, 2].sum()),
            num_samples=int(steps[:, 3].sum()),
            seconds=seconds,
        )

    def pause(self) -> "_Pause":
        """A ``with`` block whose time (evaluation, saving) does not count as training."""
        return _Pause(self)


class _Pause:
    def __init__(self, meter: LossMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter._since += time.perf_counter() - self._start


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """What happened since the last log, over all ranks."""

    losses: list[float]
    """Of each step."""
    loss_sum: float
    num_targets: int
    num_tokens: int
    num_samples: int
    seconds: float

    @property
    def mean(self) -> float:
        """The mean loss."""
        return sum(self.losses) / max(len(self.losses), 1)

    def speed(self) -> dict[str, float]:
        """Tokens and samples per second, all ranks together, and seconds per step."""
        if not self.losses or self.seconds <= 0:
            return {}
        return {
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "samples_per_second": round(self.num_samples / self.seconds, 3),
            "step_time": round(self.seconds / len(self.losses), 4),
        }
