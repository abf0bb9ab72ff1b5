"""`HangDetector`: heartbeats of each rank, so that a run that hangs reports which rank holds it up.

A thread of each rank writes one key of the rendezvous store every few seconds. Nothing is read, and no step waits,
until a step takes much longer than those before it. Then the first rank (the last one if the first is silent) reads all
heartbeats, logs which ranks do not wait for others, and stores that report for the error that ends the wait of the
others.
"""

import json
import logging
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from types import FrameType, TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mca_config.errors import McaError
from mca_models.megatron.distributed import parallel, rendezvous

_SHOWN = 4
_WAITING_FILES = ("p2p_communication.py", "param_and_grad_buffer.py", "monitor.py")
"""Files whose calls wait for other ranks in native code."""
_WITH = "contextlib.py"
"""File whose frames enter and leave the blocks of contexts."""
_WRAPPERS = ("wrapper", "decorate_context", "__enter__", "__exit__")
logger = logging.getLogger(__name__)
_INTERVAL = 5.0  # seconds between two heartbeats
_MIN_WAIT = 60.0  # seconds; a shorter phase never counts as a hang
_FACTOR = 10.0  # times the longest earlier run of the phase
_FIRST_TIME = 300.0  # seconds for a phase that has not run before
_FINDING = "finding"
_TIMED_OUT = ("timed out", "timeout")
_GLOO = ("/gloo/", "operation timed out!", "monitoredbarrier")
"""Markers of gloo's errors, which have no class; NCCL's and those of stores are `DistError`."""


@dataclass(frozen=True)
class Heartbeat:
    """Last report of a rank.

    Args:
        rank: The rank.
        number: Number of reports so far.
        host: Its machine.
        step: Its training step.
        what: Phase of the step.
        location: The running call and its source location.
        waits: True if the call waits for other ranks.
    """

    rank: int
    number: int
    host: str
    step: int
    what: str
    location: str
    waits: bool


def current_call(frame: FrameType | None) -> tuple[str, bool]:
    """Return a thread's current call, from its innermost frame, and True if it waits for other ranks."""
    operation, waits = "", False
    while frame is not None and (
        _is_in_torch_distributed(frame) or (waits and PurePath(frame.f_code.co_filename).name == _WITH)
    ):
        name = frame.f_code.co_name
        operation, waits = (operation if name in _WRAPPERS else name), True
        frame = frame.f_back
    if frame is None:
        return operation or "nothing", waits
    path = PurePath(frame.f_code.co_filename)
    location = f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return (f"{operation} in {location}" if operation else location), waits or path.name in _WAITING_FILES


def _is_in_torch_distributed(frame: FrameType) -> bool:
    parts = PurePath(frame.f_code.co_filename).parts
    return ("torch", "distributed") in pairwise(parts)


def describe_hang(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int]) -> str:
    """Describe in one line the ranks that hold up the run and their calls.

    Args:
        heartbeats: Of all ranks, in order; None: no report yet.
        silent: Ranks that have stopped reporting.
    """
    return "; ".join(_parts(heartbeats, silent))


def _parts(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int]) -> Iterator[str]:
    missing = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat is None]
    if missing:
        yield f"{_ranks(missing)}: training has not started there"
    known = [heartbeat for heartbeat in heartbeats if heartbeat is not None]
    for heartbeat in [heartbeat for heartbeat in known if heartbeat.rank in silent][:_SHOWN]:
        yield (
            f"rank {heartbeat.rank} on {heartbeat.host} has stopped reporting (stopped process or lost machine); "
            f"its last report was in {heartbeat.what} of step {heartbeat.step}, {heartbeat.location}"
        )
    groups: dict[tuple[int, str, bool], list[Heartbeat]] = {}
    for heartbeat in (heartbeat for heartbeat in known if heartbeat.rank not in silent):
        groups.setdefault((heartbeat.step, heartbeat.location, heartbeat.waits), []).append(heartbeat)
    if not missing and not silent:
        yield from _busy(groups)
    for (_, location, waits), members in groups.items():
        if waits:
            yield f"{_ranks([heartbeat.rank for heartbeat in members])}: waiting in {location}"


def _busy(groups: dict[tuple[int, str, bool], list[Heartbeat]]) -> Iterator[str]:
    """Describe the ranks that do not wait."""
    for members in [members for (_, _, waits), members in groups.items() if not waits][:_SHOWN]:
        first = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"rank {first.rank} on {first.host}{more} in {first.what} of step {first.step}: {first.location}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {names}" if len(ranks) == 1 else f"{len(ranks)} ranks ({names})"


def _connection(store: Store) -> Store:
    """Return a connection to ``store`` that calls of the main thread do not block."""
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return store.clone() if isinstance(base, TCPStore) else store


def is_timeout(error: BaseException | None) -> bool:
    """Return True if ranks waited in vain for another rank, not for a loader or a client."""
    text = str(error).lower()
    is_collective = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _GLOO)
    )
    return is_collective and any(words in text for words in _TIMED_OUT)


class HangDetector:
    """Sends this rank's heartbeats between ``__enter__`` and ``__exit__``, which must run in its main thread."""

    def __init__(self) -> None:
        self._what, self._step = "starting", 0
        self._since = time.monotonic()
        self._longest: dict[str, float] = {}
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._number = 0
        self._last_seen: dict[int, tuple[int, float]] = {}
        self._reporting_since: float | None = None
        self._next_report = 0.0

    def __enter__(self) -> "HangDetector":
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if self._size == 1:
            return self
        self._interval, self._limit = self._periods()
        self._store = PrefixStore("mca/heartbeat", _connection(dist.distributed_c10d._get_default_store()))
        self._main = threading.get_ident()
        self._ended.clear()
        self.enter("starting", 0)
        self._send()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hang-detector")
        self._thread.start()
        return self

    @staticmethod
    def _periods() -> tuple[float, float]:
        """Return the seconds between heartbeats, and after how many a rank counts as stuck."""
        timeout = parallel.timeout().total_seconds()
        return min(_INTERVAL, timeout / 20), timeout / 2

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop the heartbeats; turn a timeout into an error that names the ranks that were waited for.

        Raises:
            McaError: Ranks waited for another one in vain.
        """
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(self._interval)
        self._thread = None
        if is_timeout(error):
            raise McaError(f"{self._finding()} (waited for {2 * self._limit:.0f} s, ddp_timeout)") from error

    def enter(self, what: str, step: int) -> None:
        """Record the phase of the step that this rank enters."""
        moment = time.monotonic()
        self._longest[self._what] = max(self._longest.get(self._what, 0.0), moment - self._since)
        self._what, self._step, self._since = what, step, moment

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._send()
                if not self._is_stuck():
                    self._reporting_since, self._next_report = None, 0.0
                elif self._is_reporter():
                    self._report()
            except RuntimeError:  # the store is gone, and with it the run
                return

    def _send(self) -> None:
        assert self._store is not None
        self._number += 1
        location, waits = current_call(sys._current_frames().get(self._main))
        heartbeat = [self._number, platform.node(), self._step, self._what, location, waits]
        self._store.set(str(self._rank), json.dumps(heartbeat))

    def _is_stuck(self) -> bool:
        known = self._longest.get(self._what)
        patience = _FIRST_TIME if known is None else max(_MIN_WAIT, _FACTOR * known)
        return time.monotonic() - self._since > min(patience, self._limit)

    def _is_reporter(self) -> bool:
        """Return True on the first rank, or on the last one if the first is silent."""
        return self._rank == 0 or (self._rank == self._size - 1 and self._is_silent(0))

    def _heartbeat(self, rank: int) -> Heartbeat | None:
        assert self._store is not None
        if not self._store.check([str(rank)]):
            return None
        return Heartbeat(rank, *json.loads(self._store.get(str(rank))))

    def _is_silent(self, rank: int) -> bool:
        """Return True if a rank has sent nothing new for three intervals, as seen by this rank."""
        heartbeat, moment = self._heartbeat(rank), time.monotonic()
        number = 0 if heartbeat is None else heartbeat.number
        last, when = self._last_seen.setdefault(rank, (number, moment))
        if last != number:
            self._last_seen[rank] = number, moment
        return last == number and moment - when > 3 * self._interval

    def _report(self) -> None:
        assert self._store is not None
        moment = time.monotonic()
        waited, silent = moment - self._since, [r for r in range(self._size) if self._is_silent(r)]
        self._reporting_since = moment if self._reporting_since is None else self._reporting_since
        if moment - self._reporting_since <= 4 * self._interval or waited < self._next_report:
            return  # silence is known after some reads; report again after twice the time
        self._next_report = 2 * waited
        finding = describe_hang([self._heartbeat(rank) for rank in range(self._size)], silent)
        self._store.set(_FINDING, finding)
        say = logger.warning if self._rank == 0 else logger.error  # warnings of other ranks are filtered
        say("%s of step %d has taken %.0f s so far: %s", self._what, self._step, waited, finding)

    def _finding(self) -> str:
        """Return the stored report, read in a thread, as a stopped process may hold the store."""
        report: list[str] = []
        reader = threading.Thread(target=self._read_finding, args=(report,), daemon=True)
        reader.start()
        reader.join(3 * self._interval)
        if reader.is_alive() and not rendezvous.has_kept_store():
            report.append("rank 0, which holds the rendezvous store, has stopped reporting")
        return f"{self._what} of step {self._step}: {next(iter(report), 'another rank did not arrive')}"

    def _read_finding(self, report: list[str]) -> None:
        assert self._store is not None
        if self._store.check([_FINDING]):
            report.append(self._store.get(_FINDING).decode())
