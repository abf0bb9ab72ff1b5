"""A thread pool that works through one list and stops at the first failure."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
BUFFER_BYTES = 1 << 20  # stays in the second-level cache between read, checksum and write
_PAGE = 4096
COMPUTED_BYTES = 320 << 20  # of all threads


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
        return max(64 << 10, min(8 << 20, self.memory // (3 * self.workers) // _PAGE * _PAGE))

    @property
    def computed_bytes(self) -> int:
        """Largest dequantized tensor, in bytes, that a thread caches; larger ones are computed in bands."""
        return (COMPUTED_BYTES if self.memory is None else self.memory) // (2 * self.workers)  # gate and up


def default_workers() -> int:
    """Return the default number of threads: one per processor, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def run_all(items: Iterable[Item], workers: int, start: Callable[[], Callable[[Item], None]]) -> None:
    """Process each of ``items`` in one of ``workers`` threads.

    Args:
        items: Read one by one when a thread is free.
        workers: Number of threads.
        start: Called once in each thread; returns the function that processes one item there.

    Raises:
        BaseException: The first exception of a thread, after all have stopped.
    """
    shared = _Shared(iter(items))
    threads = [threading.Thread(target=shared.work, args=(start,), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: the threads stop after their current item
        shared.failures.insert(0, error)
        for thread in threads:
            thread.join()
    if shared.failures:
        raise shared.failures[0]


class _Shared(Generic[Item]):
    """The rest of the list, and the failures."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items, self._lock = items, threading.Lock()
        self.failures: list[BaseException] = []

    def _next_item(self) -> tuple[Item] | None:
        with self._lock:
            if not self.failures:
                for item in self._items:
                    return (item,)
        return None

    def work(self, start: Callable[[], Callable[[Item], None]]) -> None:
        """Process items until the list ends or a thread fails."""
        try:
            do = start()
            while (item := self._next_item()) is not None:
                do(*item)
        except BaseException as error:
            self.failures.append(error)
