"""SIGTERM: schedulers pre-empt. The run saves a complete checkpoint and ends, at a step that all ranks agree on."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_AGAIN = 1.0  # seconds; launchers and schedulers may both deliver the same signal


class StopSignal:
    """Listens for SIGTERM between ``__enter__`` and ``__exit__``, on every rank.

    The first one asks for a stop; one that comes a second or more later ends the process at once, as does SIGINT.
    Ranks tell each other in the background: what a step began to exchange, the next step reads, so that no step
    waits for it and all ranks stop after the same one. Only the main thread can listen.
    """

    def __init__(self) -> None:
        self._received: float | None = None
        self._before: Any = None
        self._group: Any = None
        self._work: Any = None
        self._flag = torch.zeros(1)
        self.stopped = False
        """Whether the ranks agreed to stop."""

    def __enter__(self) -> "StopSignal":
        self._received, self.stopped = None, False
        if dist.get_world_size() > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
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
        """Whether all ranks stop after this step; every rank asks after every step."""
        if self._group is None:
            self.stopped = self._received is not None
            return self.stopped
        if self._work is not None:
            self._work.wait()
            self.stopped = bool(self._flag.item())
        self._flag = torch.tensor([float(self._received is not None)])
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return self.stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and now - self._received > _AGAIN:
            os._exit(128 + number)
        if self._received is None:
            self._received = now
