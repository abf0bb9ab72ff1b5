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
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mca_config.errors import McaError
from mca_models.megatron.distributed import parallel, rendezvous
from mca_train.trainer.hang_report import Heartbeat, current_call, describe_hang

logger = logging.getLogger(__name__)

_INTERVAL = 5.0  # seconds between two heartbeats
_MIN_WAIT = 60.0  # seconds; a shorter phase never counts as a hang
_FACTOR = 10.0  # times the longest earlier run of the phase
_FIRST_TIME = 300.0  # seconds for a phase that has not run before
_FINDING = "finding"
_TIMED_OUT = ("timed out", "timeout")
_GLOO = ("/gloo/", "operation timed out!", "monitoredbarrier")
"""Markers of gloo's errors, which have no class; NCCL's and those of stores are `DistError`."""


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
        timeout = parallel.timeout().total_seconds()
        self._interval, self._limit = min(_INTERVAL, timeout / 20), timeout / 2
        self._store = PrefixStore("mca/heartbeat", _connection(dist.distributed_c10d._get_default_store()))
        self._main = threading.get_ident()
        self._ended.clear()
        self.enter("starting", 0)
        self._send()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hang-detector")
        self._thread.start()
        return self

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
        heard, when = self._last_seen.setdefault(rank, (number, moment))
        if heard != number:
            self._last_seen[rank] = number, moment
        return heard == number and moment - when > 3 * self._interval

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
