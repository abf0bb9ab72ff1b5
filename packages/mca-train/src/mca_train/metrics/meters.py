"""Meters between two logs: of losses and counts, and of custom metrics, sources, MoE load balancing and MTP layers.

Values of steps are kept until a log or a checkpoint reduces them over ranks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_models.megatron import platform
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.sample_consistency import combine_checksums
from mca_train.losses.moe_aux import routers
from mca_train.losses.token_loss import StepLoss
from mca_train.types import Chunk

Reduce = Callable[[Tensor], Tensor]
"""Element-wise reduction over all ranks; collective."""
Extreme = Literal["smallest", "largest"]
_SIGNS: dict[Extreme, float] = {"smallest": -1.0, "largest": 1.0}
"""Factor that turns an extreme into a maximum."""
_MISSING = torch.finfo(torch.float64).min
"""Value of ranks and steps without candidates."""


class StepRows:
    """One row of values for every step since the last log.

    Rows from a checkpoint are already reduced over all ranks, so a run may resume on another layout. They stay separate
    until they are summed, so an interrupted interval sums to the same bits.

    Args:
        width: Values in a row.
    """

    def __init__(self, width: int) -> None:
        self._mine: list[Tensor] = []
        self._counts: list[Sequence[float]] = []
        self.before = torch.zeros(0, width, dtype=torch.float64)

    def add(self, row: Tensor, counts: Sequence[float] = ()) -> None:
        """Add one step's values on this rank: a ``row`` on the device, then ``counts`` on the host."""
        self._mine.append(row.double())
        self._counts.append(counts)

    def all_ranks(self, reduce: Reduce) -> Tensor:
        """Return ``[steps, width]`` over all ranks; every rank calls this at the same step."""
        if not self._mine:
            return self.before
        rows = torch.stack(self._mine)
        counts = torch.tensor(self._counts, dtype=rows.dtype, device=rows.device).reshape(len(rows), -1)
        return torch.cat([self.before, reduce(torch.cat([rows, counts], 1)).cpu()])

    def flush(self, reduce: Reduce) -> Tensor:
        """Return the same as `all_ranks` and reset."""
        rows = self.all_ranks(reduce)
        self._mine, self._counts, self.before = [], [], rows[:0]
        return rows

    def restore(self, rows: Sequence[Sequence[float]]) -> None:
        """Continue from reduced ``rows``."""
        self._mine, self._counts = [], []
        self.before = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), self.before.shape[1])


class MetricAccumulator:
    """Means and extremes of named metrics between two logs, over all ranks that compute the loss.

    Ranks communicate only in `flush`, which all call at the same step. A metric without a count has no mean.

    Args:
        names: In the order of the log, the same on every rank.
        device: Device of the sums.
        differences: Also reported: the first of two means minus the second, if both exist.
        extremes: Also reported: the smallest or the largest of all values.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        device: torch.device,
        differences: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        extremes: Mapping[str, Extreme] = MappingProxyType({}),
    ) -> None:
        self.names, self._differences, self._extremes = names, differences, extremes
        self._sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        signs = [_SIGNS[which] for which in extremes.values()]
        self._signs = torch.tensor(signs, dtype=torch.float64, device=device)
        self._largest = torch.full_like(self._signs, _MISSING)
        self._steps = StepRows(2 * len(names) + len(extremes))

    def add(self, sums: Mapping[str, Tensor], count: Tensor | float | Mapping[str, Tensor]) -> None:
        """Add this rank's sums by name, each over ``count`` items, or over a count per name.

        Raises:
            McaError: A name has no metric.
        """
        for name in sums:
            if name not in self.names:
                raise McaError(f"metric '{name}' is not in metric_names; add it")
        values = torch.stack([sums[name].detach().double() for name in self.names])
        if isinstance(count, Mapping):
            count = torch.stack([count[name].double() for name in self.names])
        self._sums[:, 0] += values
        self._sums[:, 1] += count

    def add_extremes(self, values: Tensor, real: Tensor) -> None:
        """Add this rank's candidates for extremes, where ``real`` is not 0."""
        candidates = self._signs[:, None] * values.detach().double().flatten()
        candidates = candidates.masked_fill(real.flatten() == 0, _MISSING)
        self._largest = torch.cat([self._largest[:, None], candidates], 1).amax(1)

    def end_step(self) -> None:
        """Close the step that the added values belong to."""
        if self.names:
            self._steps.add(torch.cat([self._sums.flatten(), self._largest]))
            self._sums, self._largest = torch.zeros_like(self._sums), torch.full_like(self._largest, _MISSING)

    def flush(self) -> dict[str, float]:
        """Return the metrics and reset."""
        if not self.names:
            return {}
        self.end_step()
        rows = self._steps.flush(self._reduce)
        total = rows[:, : 2 * len(self.names)].sum(0).reshape(-1, 2)
        sums = zip(self.names, total.tolist(), strict=True)
        means = {name: value / count for name, (value, count) in sums if count > 0}
        both = {name: pair for name, pair in self._differences.items() if means.keys() >= {*pair}}
        means |= {name: means[a] - means[b] for name, (a, b) in both.items()}
        largest = rows[:, 2 * len(self.names) :].amax(0) * self._signs.cpu()
        extremes = zip(self._extremes, largest.tolist(), strict=True)
        return means | {name: value for name, value in extremes if abs(value) < -_MISSING}

    def _reduce(self, rows: Tensor) -> Tensor:
        width = 2 * len(self.names)
        sums = groups.sum_over_data(rows[:, :width])
        if not self._extremes:
            return sums
        return torch.cat([sums, groups.max_over_data(rows[:, width:])], 1)

    def state(self) -> list[list[float]]:
        """Return the sums of every step since the last log, for a checkpoint; collective."""
        return self._steps.all_ranks(self._reduce).tolist() if self.names else []

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from `state`, saved on any layout."""
        self._steps.restore(state)


class AuxLossMeter:
    """Losses of layers that are added to the gradients but not to the logged loss.

    ``moe_load_balancing_loss`` (and ``moe_z_loss``, ...) is the mean over the MoE layers, without its coefficient;
    ``mtp_<depth>_loss`` is the mean cross entropy of an MTP layer.

    Args:
        chunks: Megatron models of this rank.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = list(chunks)
        self._has_experts = bool(self._chunks[0].config.num_moe_experts)
        self._routers = list(routers(self._chunks)) if self._has_experts else []
        self._prediction = int(self._chunks[0].config.mtp_num_layers or 0)
        self._steps = 0
        self._before: dict[str, list[float]] = {}
        self._rows: dict[str, StepRows] = {}
        self._depths = StepRows(self._prediction)

    def add_step(self) -> None:
        """Add the losses of the last step."""
        self._steps += 1
        for name, value in self._router_losses().items():
            self._rows.setdefault(name, StepRows(1)).add(value.reshape(1))
        if self._prediction:
            self._depths.add(self._mtp_losses())

    def flush(self) -> dict[str, float]:
        """Return the means since the last call. All ranks call this at the same step."""
        state = self.state()
        count = max(state["steps"], 1)
        self._steps, self._before, self._rows = 0, {}, {}
        self._depths = StepRows(self._prediction)
        means = {f"moe_{name}": sum(values) / count for name, values in state["experts"].items()}
        by_depth = zip(*state["depths"], strict=True)
        return means | {f"mtp_{n}_loss": sum(values) / count for n, values in enumerate(by_depth, 1)}

    def state(self) -> JsonObject:
        """Return the sums since the last log over all ranks, for a checkpoint; collective."""
        return {
            "steps": self._steps,
            "experts": self._mean_over_layers() if self._has_experts else {},
            "depths": self._depths.all_ranks(groups.sum_over_data).tolist() if self._prediction else [],
        }

    def restore(self, state: Values) -> None:
        """Continue from `state`, saved on any layout."""
        self._steps, self._before, self._rows = int(state["steps"]), dict(state["experts"]), {}
        self._depths.restore(state["depths"])

    def _router_losses(self) -> dict[str, Tensor]:
        """Return the last step's router losses on this rank, summed over its layers."""
        losses: dict[str, Tensor] = {}
        for router in self._routers:
            for name, value in router.mca_aux_loss.losses.items():
                losses[name] = losses[name] + value if name in losses else value
        return losses

    def _mtp_losses(self) -> Tensor:
        """Return the last step's MTP losses on this rank, by depth."""
        values = torch.zeros(self._prediction, dtype=torch.float64, device=platform.current_device())
        for chunk in self._chunks:
            if "mca_mtp_loss" in vars(chunk):
                values += chunk.mca_mtp_loss.losses
        return values

    def _mean_over_layers(self) -> dict[str, list[float]]:
        """Return the means over layers of each step, by name."""
        stage = {
            name: rows.all_ranks(groups.sum_over_stage).flatten().tolist()
            for name, rows in sorted(self._rows.items())
        }
        stages = groups.gather_over_stages((len(self._routers), stage))
        layers = sum(count for count, _ in stages)
        total: dict[str, list[float]] = {}
        for _, part in stages:
            for name, values in part.items():
                known = total.get(name, [0.0] * len(values))
                total[name] = [a + b / layers for a, b in zip(known, values, strict=True)]
        names = sorted(self._before.keys() | total.keys())
        return {name: [*self._before.get(name, []), *total.get(name, [])] for name in names}


class SourceLosses(MetricAccumulator):
    """``loss/<source>`` of the sources that had targets since the last log.

    Args:
        sources: Their names, the same on every rank.
        device: Device of the sums.
    """

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        super().__init__(tuple(f"loss/{name}" for name in sources), device)

    def add_tokens(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add the cross entropies ``[b, s]`` of a micro-batch."""
        if batch.sources is None:
            return
        token_sources = batch.sources[batch.segments.clamp(max=len(batch.sources) - 1)].flatten()
        mask = batch.loss_mask.flatten().double()
        for column, values in enumerate((losses.detach().flatten().double() * mask, mask)):
            self._sums[:, column].index_add_(0, token_sources, values)


@dataclass
class LossMeter:
    """Collects the steps' losses; ranks communicate only for a log.

    The loss of a log is the mean of its steps' losses, each a mean over all targets of the global batch. A step without
    a target is left out.
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
        steps = self._steps.all_ranks(groups.sum_over_data).tolist()
        return {"steps": steps, "seconds": time.perf_counter() - self._since}

    def restore(self, state: Values) -> None:
        """Continue from `state`, saved on any layout."""
        self._steps.restore(state["steps"])
        self._since = time.perf_counter() - float(state["seconds"])

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a ``with`` block whose time (evaluation, saving) does not count as training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start


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
