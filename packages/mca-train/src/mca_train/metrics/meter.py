"""Losses and counts between two logs, summed over ranks for each log."""

import time
from dataclasses import dataclass, field

import torch

from mca_config.types import JsonObject, Values
from mca_train import groups
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.sample_consistency import combine_checksums
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.metric_accumulator import StepRows


@dataclass
class LossMeter:
    """Collects the steps' losses; ranks communicate only for a log.

    The loss of a log is the mean of its steps' losses, each a mean over all targets of the global batch. A step without
    a
    target is left out.
    """

    context_parallel_rank: int
    _steps: StepRows = field(default_factory=lambda: StepRows(7))
    _since: float = field(default_factory=time.perf_counter)
    _checksum: int = 0

    def add(self, loss: StepLoss, batch: StepBatch) -> None:
        """Add one step of this rank. Ranks that share samples count them once."""
        once = self.context_parallel_rank == 0
        media = (batch.image_tokens, batch.audio_tokens)
        counts = (batch.num_tokens, batch.num_samples, batch.squares, *media)
        self._steps.add(
            torch.stack([loss.loss_sum.double(), loss.targets.double()]), [count * once for count in counts]
        )
        self._checksum = combine_checksums(self._checksum, batch.checksum)

    def flush(self) -> "LossReport":
        """Return the sums over all ranks and reset. Every rank calls this at the same step."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        steps = self._steps.flush(groups.sum_over_data)
        checksum, self._checksum = self._checksum, 0
        targets = steps[:, 1]
        over = targets != 0
        return LossReport(
            losses=(steps[over, 0] / targets[over]).tolist(),
            num_steps=len(steps),
            loss_sum=float(steps[:, 0].sum()),
            targets=targets.tolist(),
            num_tokens=int(steps[:, 2].sum()),
            num_samples=int(steps[:, 3].sum()),
            squares=int(steps[:, 4].sum()),
            image_tokens=int(steps[:, 5].sum()),
            audio_tokens=int(steps[:, 6].sum()),
            seconds=seconds,
            checksum=checksum,
        )

    @property
    def samples_before(self) -> int:
        """Return the number of samples of steps from a checkpoint."""
        return int(self._steps.before[:, 3].sum())

    def state(self) -> JsonObject:
        """Return the sums since the last log, for a checkpoint. Every rank calls this at the same step."""
        return {"steps": self._steps.all_ranks(groups.sum_over_data).tolist(), "seconds": self._seconds()}

    def restore(self, state: Values) -> None:
        """Continue from `state`, saved on any layout."""
        self._steps.restore(state["steps"])
        self._since = time.perf_counter() - float(state["seconds"])

    def _seconds(self) -> float:
        return time.perf_counter() - self._since

    def pause(self) -> "_Pause":
        """Return a ``with`` block whose time (evaluation, saving) does not count as training."""
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
    """Sums since the last log, over all ranks."""

    losses: list[float]
    """Loss of each step with a target."""
    num_steps: int
    """Steps with and without a target."""
    loss_sum: float
    targets: list[float]
    """Loss count of each step: the number of targets, or the count of a custom loss."""
    num_tokens: int
    num_samples: int
    squares: int
    """Sum of squared sequence lengths."""
    image_tokens: int
    """Placeholders of images and videos, included in ``num_tokens``."""
    audio_tokens: int
    """Placeholders of audio, included in ``num_tokens``."""
    seconds: float
    checksum: int
    """Checksum of this rank's samples in the steps that this process has done."""

    @property
    def mean(self) -> float:
        """Return the mean loss; 0 without a target."""
        return sum(self.losses) / max(len(self.losses), 1)

    def speed(self) -> dict[str, float]:
        """Return tokens and samples per second over all ranks, and seconds per step."""
        if not self.num_steps or self.seconds <= 0:
            return {}
        return {
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "samples_per_second": round(self.num_samples / self.seconds, 3),
            "step_time": round(self.seconds / self.num_steps, 4),
        }
