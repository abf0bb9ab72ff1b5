"""`StopSignal` handles SIGTERM, by which schedulers end a job: all ranks agree on the step to stop after.

`monitor` then saves and ends the run.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mca_models.megatron import platform

if TYPE_CHECKING:
    from signal import _HANDLER

_AGAIN = 1.0  # seconds; launchers and schedulers may both deliver the same signal


class StopSignal:
    """Handles SIGTERM between ``__enter__`` and ``__exit__``, on every rank.

    The first signal requests a stop. One that comes a second or more later ends the process at once, as does SIGINT.
    After each step the ranks start an all-reduce of the request and read that of the step before, so no step waits and
    all ranks stop after the same one. Only the main thread can handle signals.
    """

    def __init__(self) -> None:
        self._received: float | None = None
        self._before: _HANDLER = None
        self._work: dist.Work | None = None
        self._request = torch.zeros(1)
        self.stopped = False
        """True if the ranks agreed to stop."""

    def __enter__(self) -> "StopSignal":
        self._received, self.stopped = None, False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._work is not None and error[0] is None:
            self._work.wait()
        self._work = None
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def agreed(self) -> bool:
        """Return True if all ranks stop after this step; every rank calls this after every step."""
        if dist.get_world_size() == 1:
            self.stopped = self._received is not None
            return self.stopped
        if self._work is not None:
            self._work.wait()
            self.stopped = bool(self._request)
        self._request = torch.tensor([float(self._received is not None)], device=platform.current_device())
        self._work = dist.all_reduce(self._request, dist.ReduceOp.MAX, async_op=True)
        return self.stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and now - self._received > _AGAIN:
            os._exit(128 + number)
        if self._received is None:
            self._received = now
