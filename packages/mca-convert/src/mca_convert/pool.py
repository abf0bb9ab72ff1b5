"""Limits of threads, memory and open files, and a thread pool that stops at the first failure."""

import os
import resource
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from mca_config.errors import McaError

Item = TypeVar("Item")
BUFFER_BYTES = 1 << 20  # stays in the second-level cache between read, checksum and write
LEAST_MEMORY = 192 << 10
"""Bytes of the smallest buffers of a thread."""
_PAGE = 4096
COMPUTED_BYTES = 320 << 20  # of all threads
_OTHER_FILES = 16
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, by one thread at a time; may raise an error to stop."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of threads and memory of a conversion.

    Args:
        workers: Threads.
        memory: Bytes of all buffers together; None is the default size.
    """

    workers: int
    memory: int | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of at most three buffers of a thread."""
        if self.memory is None:
            return BUFFER_BYTES
        return max(LEAST_MEMORY // 3, min(8 << 20, self.memory // (3 * self.workers) // _PAGE * _PAGE))

    @property
    def computed_bytes(self) -> int:
        """Largest dequantized tensor, in bytes, that a thread caches; larger ones are computed in bands."""
        return (COMPUTED_BYTES if self.memory is None else self.memory) // (2 * self.workers)  # gate and up


def require_count(name: str, value: int) -> None:
    """Raise `McaError` unless ``value``, the argument ``name``, is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise McaError(f"{name}: expected a whole number of at least 1, not {value!r}")


def default_workers() -> int:
    """Return the default number of threads: one per processor, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


class ByteCounter:
    """Count of processed bytes, which it reports to a callback; thread-safe.

    Args:
        total: Bytes of the whole work.
        report: Called with the bytes done and ``total``, by one thread at a time; may raise an error to stop.
    """

    def __init__(self, total: int, report: Progress | None) -> None:
        self._total, self._report, self._done = total, report, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Report ``nbytes`` more."""
        with self._lock:
            self._done += nbytes
            if self._report is not None:
                self._report(self._done, self._total)

    def check(self) -> None:
        """Report the same count once more, so that the callback can stop the work."""
        self.add(0)


def run_all(items: Iterable[Item], workers: int, start: Callable[[], Callable[[Item], None]]) -> None:
    """Process each of ``items`` in one of ``workers`` threads.

    Args:
        items: Read one by one when a thread is free.
        workers: Number of threads.
        start: Called once in each thread; returns the function that processes one item there.

    Raises:
        BaseException: The first exception of a thread, after all have stopped.
    """
    left, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def next_item() -> list[Item]:
        with lock:
            return [] if failures else list(islice(left, 1))

    def work() -> None:
        try:
            do = start()
            while item := next_item():
                do(*item)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: the threads stop after their current item
        failures.insert(0, error)
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files to the hard one, because large checkpoints have hundreds of files.

    Raises:
        McaError: ``count`` files are more than the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if fault := too_many_files(count):
        raise McaError(fault)


def too_many_files(count: int) -> str | None:
    """Return the message if ``count`` files cannot be open at once, else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or count + _OTHER_FILES <= hard:
        return None
    return (
        f"{count} files must be open at once, the system allows {hard}; raise its limit (ulimit -Hn), or convert "
        "to fewer files (a larger --max_shard_size, smaller parallel sizes)"
    )
