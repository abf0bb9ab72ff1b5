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
    The rank that hears it writes down, where all ranks look after every step, that the step after the next is not
    made: no rank is a whole step ahead of another, so all stop after the same one, and none waits for the others.
    Only the main thread can listen.
    """

    _runs = 0

    def __init__(self) -> None:
        self._received: float | None = None
        self._before: Any = None
        self._store: Any = None
        self._key = ""
        self._step = 0
        self.stopped = False
        """Whether the ranks agreed to stop."""

    def __enter__(self) -> "StopSignal":
        self._received, self.stopped, self._step = None, False, 0
        if dist.get_world_size() > 1:
            StopSignal._runs += 1
            self._key = f"mca_train_stops_after/{StopSignal._runs}"
            self._store = dist.distributed_c10d._get_default_store()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def agreed(self) -> bool:
        """Whether all ranks stop after this step; every rank asks after every step."""
        if self._store is None:
            self.stopped = self._received is not None
            return self.stopped
        self._step += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a rank's program is not ahead of its device either
        if self._store.check([self._key]):
            self.stopped = self._step >= int(self._store.get(self._key))
        elif self._received is not None:
            self._store.compare_set(self._key, "", str(self._step + 1))
        return self.stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and now - self._received > _AGAIN:
            os._exit(128 + number)
        if self._received is None:
            self._received = now
