"""The progress bar."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SMALLEST_STEP = 16 << 20


@contextmanager
def bar(nbytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar of ``nbytes`` on a terminal; yields a thread-safe function that adds to it."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm

    lock, pending = threading.Lock(), 0
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc=what, mininterval=0.2) as display:

        def add(count: int) -> None:
            nonlocal pending
            with lock:
                pending += count
                if pending >= _SMALLEST_STEP:
                    display.update(pending)
                    pending = 0

        yield add
        display.update(pending)
