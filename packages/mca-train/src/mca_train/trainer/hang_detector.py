"""`Pulse`: each rank says every few seconds what it is doing, so that a run that hangs says who holds it up.

A thread of each rank writes one key of the store by which the ranks found each other; nothing is read, and no step
waits, until a step takes much longer than those before it. Then the first rank (the last one, if the first is silent)
reads what all said, logs which ranks do something else than to wait for others, and leaves that in the store for the
error in which the wait of the others will end.
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
from mca_train.trainer.hang_report import Sign, doing, told

logger = logging.getLogger(__name__)

_BEAT = 5.0  # seconds between two signs of life
_LEAST = 60.0  # seconds without progress, after which a run may hang
_TIMES = 10.0  # of the longest time that the same took before
_UNKNOWN = 300.0  # seconds that something may take which was not done before
_FINDING = "finding"
_TIMED_OUT = ("timed out", "timeout")
_GLOO = ("/gloo/", "operation timed out!", "monitoredbarrier")
"""What texts of gloo's errors have, which have no class of their own; NCCL's and those of stores are `DistError`."""


def _connection(store: Store) -> Store:
    """A connection to ``store`` in which no call of the main thread keeps others waiting."""
    kept = store
    while isinstance(kept, PrefixStore):
        kept = kept.underlying_store
    return store.clone() if isinstance(kept, TCPStore) else store


def is_time_out(error: BaseException | None) -> bool:
    """Whether ranks waited for another in vain, and not a loader or a client for something else."""
    text = str(error).lower()
    of_ranks = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _GLOO)
    )
    return of_ranks and any(words in text for words in _TIMED_OUT)


class Pulse:
    """Says what this rank does between ``__enter__`` and ``__exit__``, which must be in its main thread."""

    def __init__(self) -> None:
        self._what, self._step = "starting", 0
        self._since = time.monotonic()
        self._longest: dict[str, float] = {}
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._number = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._looking: float | None = None
        self._next = 0.0

    def __enter__(self) -> "Pulse":
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if self._size == 1:
            return self
        timeout = parallel.timeout().total_seconds()
        self._beat, self._limit = min(_BEAT, timeout / 20), timeout / 2
        self._store = PrefixStore("mca/pulse", _connection(dist.distributed_c10d._get_default_store()))
        self._main = threading.get_ident()
        self._ended.clear()
        self.now("starting", 0)
        self._say()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pulse")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Ends it; a time-out becomes an error that says who was waited for.

        Raises:
            McaError: Ranks waited for another one in vain.
        """
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(self._beat)
        self._thread = None
        if is_time_out(error):
            raise McaError(f"{self._finding()} (waited for {2 * self._limit:.0f} s, ddp_timeout)") from error

    def now(self, what: str, step: int) -> None:
        """Says what the rank begins to do."""
        moment = time.monotonic()
        self._longest[self._what] = max(self._longest.get(self._what, 0.0), moment - self._since)
        self._what, self._step, self._since = what, step, moment

    def _run(self) -> None:
        while not self._ended.wait(self._beat):
            try:
                self._say()
                if not self._is_stuck():
                    self._looking, self._next = None, 0.0
                elif self._speaks():
                    self._look()
            except RuntimeError:  # the store is gone, and with it the run
                return

    def _say(self) -> None:
        assert self._store is not None
        self._number += 1
        place, waits = doing(sys._current_frames().get(self._main))
        sign = [self._number, platform.node(), self._step, self._what, place, waits]
        self._store.set(str(self._rank), json.dumps(sign))

    def _is_stuck(self) -> bool:
        known = self._longest.get(self._what)
        patience = _UNKNOWN if known is None else max(_LEAST, _TIMES * known)
        return time.monotonic() - self._since > min(patience, self._limit)

    def _speaks(self) -> bool:
        """Whether this rank reports: the first one, or the last one if the first is silent."""
        return self._rank == 0 or (self._rank == self._size - 1 and self._is_silent(0))

    def _sign(self, rank: int) -> Sign | None:
        assert self._store is not None
        if not self._store.check([str(rank)]):
            return None
        return Sign(rank, *json.loads(self._store.get(str(rank))))

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank has said nothing new for three beats, as far as this one has looked."""
        sign, moment = self._sign(rank), time.monotonic()
        number = 0 if sign is None else sign.number
        heard, when = self._heard.setdefault(rank, (number, moment))
        if heard != number:
            self._heard[rank] = number, moment
        return heard == number and moment - when > 3 * self._beat

    def _look(self) -> None:
        assert self._store is not None
        moment = time.monotonic()
        waited, silent = moment - self._since, [r for r in range(self._size) if self._is_silent(r)]
        self._looking = moment if self._looking is None else self._looking
        if moment - self._looking <= 4 * self._beat or waited < self._next:
            return  # who is silent is known after some looks; and it is reported when twice the time has passed
        self._next = 2 * waited
        finding = told([self._sign(rank) for rank in range(self._size)], silent)
        self._store.set(_FINDING, finding)
        say = logger.warning if self._rank == 0 else logger.error  # what other ranks warn of is not shown
        say("%s of step %d has taken %.0f s so far: %s", self._what, self._step, waited, finding)

    def _finding(self) -> str:
        """What a rank found that looked, in a thread, as the store may be held by a process that stands still."""
        found: list[str] = []
        reader = threading.Thread(target=self._read_finding, args=(found,), daemon=True)
        reader.start()
        reader.join(3 * self._beat)
        if reader.is_alive() and not rendezvous.has_kept_store():
            found.append("rank 0, which the others need to find each other, does not report any more")
        return f"{self._what} of step {self._step}: {next(iter(found), 'another rank did not come')}"

    def _read_finding(self, found: list[str]) -> None:
        assert self._store is not None
        if self._store.check([_FINDING]):
            found.append(self._store.get(_FINDING).decode())
