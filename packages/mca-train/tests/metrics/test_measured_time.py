"""Seconds between logs, with a clock that the test sets."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train import groups
from mca_train.engine.engine import Stopwatch
from mca_train.metrics import stragglers, throughput
from mca_train.metrics.meters import LossMeter
from mca_train.metrics.stragglers import Stragglers
from mca_train.metrics.throughput import ModelFlops, Throughput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(groups, "sum_over_data", lambda rows: rows)
    return made


def test_a_log_has_the_seconds_since_the_last_one_without_pauses(clock: Clock) -> None:
    meter = LossMeter(0, _since=clock())
    clock.now += 3
    assert meter.flush().seconds == 3
    clock.now += 2
    with meter.pause():
        clock.now += 50
    assert meter.state()["seconds"] == 2
    clock.now += 4
    assert meter.flush().seconds == 6
    meter.restore({"steps": [], "seconds": 5.0})
    clock.now += 1
    assert meter.flush().seconds == 6


@pytest.mark.parametrize(("losses", "mean"), [([], 0.0), ([3.0], 3.0), ([3.0, 6.0], 4.5)])
def test_the_loss_of_a_log_is_the_mean_of_its_steps(losses: list[float], mean: float, clock: Clock) -> None:
    assert replace(LossMeter(0).flush(), losses=losses).mean == mean


@pytest.mark.parametrize("steps", [1, 2])
def test_seconds_on_the_host_are_those_of_a_step(steps: int, clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(steps):
        watch.begin_step()
        with watch.running():
            clock.now += 3
    assert watch.read(steps) == 3


def test_a_rank_counts_the_seconds_that_it_waits_for_batches(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three ranks read four seconds for a step, and the last one a second."""

    def batches() -> Any:
        for seconds in (3, 5):
            clock.now += seconds
            yield seconds
        clock.now += 0

    ranks: Any = SimpleNamespace(
        rank=1, world_size=3, device=torch.device("cpu"), layout=SimpleNamespace(pp=1), is_first=False
    )
    logged = Stragglers(ranks)
    for _ in logged.reading(batches()):
        clock.now += 100  # a step
    summed: list[Any] = []

    def add_others(box: torch.Tensor) -> None:
        summed.append(box.tolist())
        box[0], box[2] = torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 0, 0])

    monkeypatch.setattr(stragglers.dist, "all_reduce", add_others)
    monkeypatch.setattr(stragglers.dist, "broadcast_object_list", lambda *_, **__: None)
    assert logged.report(2, 7.5, 9) == {"slowest_rank": 1, "slowest_rank_behind": 3.0}
    assert summed == [[[0, 0, 0], [4, 0, 7.5], [0, 0, 0]]]
    assert logged.report(2, 7.5, 11) == {}, "the seconds are counted once"
    assert logged.report(0, 7.5, 11) == {} and len(summed) == 2
    ranks.world_size = 1
    assert logged.report(2, 7.5, 13) == {} and len(summed) == 2


@pytest.mark.parametrize("peak", [None, 4e12])
@pytest.mark.parametrize("bubble", [0.0, 1 / 3])
def test_a_log_has_the_flops_of_a_second(
    peak: float | None, bubble: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 2.0004)
    monkeypatch.setattr(groups, "max_over_ranks", lambda value, device: value + 1)
    made = Throughput.__new__(Throughput)
    made._flops, made._peak, made._bubble = ModelFlops(3e9, 1e8), peak, bubble
    made._ranks = SimpleNamespace(device=None, world_size=2)  # type: ignore[assignment]
    report: Any = SimpleNamespace(num_tokens=1000, squares=5000, seconds=2.0)
    expected = {"peak_memory_gib": 3.0, **({"pipeline_bubble": 0.3333} if bubble else {})}
    rate = (1000 * 3e9 + 5000 * 1e8) / 2  # 1.75e12
    assert made.report(report) == {
        **expected,
        "model_tflops": rate / 1e12,
        **({"mfu": float(f"{rate / 8e12:.4g}")} if peak else {}),
    }
    for name, value in (("num_tokens", 0), ("seconds", 0.0)):
        assert made.report(SimpleNamespace(**vars(report) | {name: value})) == expected  # type: ignore[arg-type]
