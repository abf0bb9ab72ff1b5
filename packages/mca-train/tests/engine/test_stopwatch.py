"""Seconds of the blocks of a step, on the host and by events of a GPU."""

from typing import Any

import pytest
import torch

from mca_train.engine import engine
from mca_train.engine.engine import Stopwatch


def test_blocks_on_the_host_are_averaged_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        watch.begin_step()
        with watch.running():
            pass
    assert watch.read(2) == (2 + 6) / 2
    with watch.running():
        pass
    assert watch.read(0) == 1.0, "what was read is not counted again"
    assert watch.read(1) == 0.0


def test_events_of_a_gpu_are_those_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 200.0, 250.0, 1000.0, 1500.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.milliseconds = next(clock)

        def elapsed_time(self, after: Any) -> float:
            return float(after.milliseconds - self.milliseconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    for blocks in (1, 2):
        watch.begin_step()
        for _ in range(blocks):
            with watch.running():
                pass
    assert watch.read(2) == (50 + 500) / 1000
