"""`StopSignal` handles SIGTERM, by which schedulers end a job: all ranks agree on the step to stop after.

`monitor` then saves and ends the run.
"""

import contextlib
import hashlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mca_models.megatron.distributed import parallel

if TYPE_CHECKING:
    from signal import _HANDLER

_AGAIN = 1.0  # seconds; launchers and schedulers may both deliver the same signal
_EVERY = 1.0  # seconds between the exchanges of steps that are shorter
_LONGEST = 1000  # steps, if a step takes no time
_made = itertools.count()  # groups
_WIDEST = 64  # ranks of a group: gloo connects each with each, and keeps a list of all for every rank


class StopSignal:
    """Handles SIGTERM between ``__enter__`` and ``__exit__``, on every rank.

    The first signal requests a stop. One that comes a second or more later ends the process at once, as does SIGINT.
    Ranks
    exchange the request in the background: the next step reads the result of an exchange, so no step waits and all
    ranks
    stop after the same one. Many ranks form a grid and exchange along one axis per step. Steps shorter than a second
    exchange about once a second: each exchange also sets the number of steps before the next. `other_steps` marks steps
    of
    another length. Only the main thread can handle signals.
    """

    def __init__(self) -> None:
        self._received: float | None = None
        self._before: _HANDLER = None
        self._groups: list[dist.ProcessGroup] = []
        self._left: list[dist.ProcessGroup] = []
        self._work: dist.Work | None = None
        self._box = torch.zeros(2)
        self._pause = 0
        self._is_outdated = False
        self._steps = 0
        self._since = 0.0
        self.stopped = False
        """True if the ranks agreed to stop."""

    def __enter__(self) -> "StopSignal":
        self._received, self.stopped = None, False
        self._begin_steps()
        if dist.get_world_size() > 1 and not self._groups:
            self._groups = [
                _new_group(ranks) for ranks in axis_groups(dist.get_rank(), dist.get_world_size())
            ]
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._work is not None and error[0] is None:
            self._work.wait()
        self._work = None
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @contextlib.contextmanager
    def other_steps(self) -> Iterator[None]:
        """Mark a block of steps with another duration; every rank enters it after the same step.

        Otherwise the number of short steps between two exchanges would apply to long ones.
        """
        self._begin_steps()
        try:
            yield
        finally:
            self._begin_steps()

    def _begin_steps(self) -> None:
        """Reset the measured step time, also for a pending exchange."""
        self._pause, self._steps, self._since = 0, 0, time.monotonic()
        self._is_outdated = True

    def agreed(self) -> bool:
        """Return True if all ranks stop after this step; every rank calls this after every step."""
        if not self._groups:
            self.stopped = self._received is not None
            return self.stopped
        self._steps += 1
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._left:
                self._start_exchange()
                return self.stopped
            stop, pause = self._box.tolist()
            self.stopped, self._pause = stop > 0, 0 if self._is_outdated else -int(pause)
        if self._pause > 0:
            self._pause -= 1
        else:
            self._exchange()
        return self.stopped

    def _exchange(self) -> None:
        """Start to exchange the stop request and the number of steps before the next exchange."""
        now = time.monotonic()
        step_time = max((now - self._since) / self._steps, 1e-6)
        pause = min(max(int(_EVERY / step_time) - len(self._groups), 0), _LONGEST)
        self._steps, self._since, self._is_outdated = 0, now, False
        self._box = torch.tensor([float(self._received is not None), -float(pause)])  # the smallest wins
        self._left = list(self._groups)
        self._start_exchange()

    def _start_exchange(self) -> None:
        """Start the exchange along the next axis."""
        group = self._left.pop(0)
        self._work = dist.all_reduce(self._box, dist.ReduceOp.MAX, group=group, async_op=True)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and now - self._received > _AGAIN:
            os._exit(128 + number)
        if self._received is None:
            self._received = now


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a group from its members alone; each rank creates the same number.

    Torch below 2.15 names a group after the number of groups that a rank is in. Ranks of other pipeline stages are in
    more
    or fewer, so they would wait for each other under two names (seen with 2.11).
    """
    name = hashlib.sha1(f"mca {next(_made)} {ranks}".encode(), usedforsecurity=False).hexdigest()
    with mock.patch.object(distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        group = dist.new_group(
            ranks, backend="gloo", timeout=parallel.timeout(), use_local_synchronization=True
        )
    return cast("dist.ProcessGroup", group)


def axis_groups(rank: int, size: int) -> list[list[int]]:
    """Return the ranks in line with ``rank`` along each axis of a grid of ``size`` ranks.

    The number of axes is minimal with none longer than 64, or than the largest prime factor of ``size``.
    """
    lines, stride = [], 1
    for length in _axes(size):
        first = rank - rank // stride % length * stride
        lines.append([first + number * stride for number in range(length)])
        stride *= length
    return lines


def _axes(size: int) -> list[int]:
    axes: list[int] = []
    for prime in sorted(_primes(size), reverse=True):
        fitting = [number for number, axis in enumerate(axes) if axis * prime <= _WIDEST]
        if fitting:
            axes[fitting[0]] *= prime
        else:
            axes.append(prime)
    return axes


def _primes(size: int) -> list[int]:
    primes, divisor = [], 2
    while divisor <= math.isqrt(size):
        while size % divisor == 0:
            primes.append(divisor)
            size //= divisor
        divisor += 1
    return primes + [size] * (size > 1)
