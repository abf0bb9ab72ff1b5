"""Timing of blocks of a step on this rank's device, without synchronizing with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums up the time of blocks until it is read.

    On a GPU it records an event before and after each block. They are read where the host waits for the device anyway.
    Only the blocks of the last step are known there.

    Args:
        device: Where the blocks are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        if self._on_host:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def begin_step(self) -> None:
        """Discard the blocks of the step before."""
        self._events.clear()

    def read(self, steps: int) -> float:
        """Return the seconds per step and reset.

        Args:
            steps: Number of steps since the last call.
        """
        if self._on_host:
            seconds, self._seconds = self._seconds / max(steps, 1), 0.0
            return seconds
        return float(sum(before.elapsed_time(after) for before, after in self._events)) / 1000
