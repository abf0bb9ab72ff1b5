"""Keeps the reason for which Megatron's checkpoint writer failed.

megatron-core 0.19 writes the last (here: only) file of a rank in the calling thread, finds that the result is an
exception, and fails an assertion that names its class: ``error: <class 'OSError'>``. That the disk is full is lost.
Here the exception itself is raised, which Megatron catches in the same place and whose words it passes on. 0.16 passes
it on by itself, and logs torch's words besides (``unexpected pos 704 vs 598``): of a failure one line is enough.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def reasons_kept() -> Iterator[None]:
    """A block in which saves that begin, here or in processes forked here, fail in their own words."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    log = logging.getLogger(filesystem_async.__name__)
    level = log.level
    original = FileSystemWriterAsync.write_preloaded_data

    def write(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result is not None and isinstance(result[1], Exception):
            raise result[1]
        return result

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)
        log.setLevel(level)
