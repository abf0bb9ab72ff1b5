"""Checkpoint writing, at once or in the background while training continues.

A checkpoint is written in stages: the weights, the optimizer, then sizes and checksums of all files. In the background
each stage runs during training steps, and after every step the ranks agree on whether it is done. All ranks write into
a temporary directory next to the destination, which is renamed after the last stage. Old checkpoints are deleted in a
thread once a newer one is complete.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from mca_config.errors import DiskFull, McaError
from mca_config.files import naming_read_errors
from mca_models.megatron.distributed.collectives import SharedDirectory, disk_space_hint, is_disk_full
from mca_models.storage.staging_folder import remove_leftovers, stage_for_removal
from mca_train.types import Upstream


class WriteStage(Protocol):
    """A pending write; both methods are collective."""

    def done(self) -> bool:
        """Return True if `finish` would not wait; the same on every rank."""

    def finish(self) -> object:
        """Wait until it is on disk."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time; every method is collective.

    Args:
        in_background: Return from `write` when everything is copied, and write while training continues. Otherwise
            return when the checkpoint is complete.
    """

    def __init__(self, *, in_background: bool) -> None:
        self._in_background = in_background
        self._destination = Path()
        self._shared: SharedDirectory | None = None
        self._stages: list[WriteStage] = []
        self._published: Callable[[], object] = lambda: None
        self._deletions: list[threading.Thread] = []
        self.written: list[Path] = []
        """The checkpoints that are complete."""

    def write(
        self,
        destination: Path,
        begin: Callable[[Path], Sequence[WriteStage]],
        published: Callable[[], object],
    ) -> None:
        """Start a checkpoint, once the one before it is complete.

        Args:
            destination: Replaced if it exists.
            begin: Function that starts to write into a directory that all ranks see and returns the stages in order.
            published: Called when the checkpoint is complete.

        Raises:
            McaError: This one, or the one before, could not be written.
        """
        self.finish()
        self._wait_for_room()
        self._destination, self._published = destination, published
        with self._cleanup_on_error():
            self._shared = SharedDirectory(destination, overwrite=True)
            self._stages = list(begin(self._shared.path))
        if not self._in_background:
            self.finish()

    def advance(self) -> None:
        """Publish the pending checkpoint if it is complete; call this after every step.

        Raises:
            McaError: A rank could not write it.
        """
        while self._stages:
            with self._cleanup_on_error():
                if not self._stages[0].done():
                    return
            self._finish_stage()

    def finish(self) -> None:
        """Wait until the pending checkpoint is published.

        Raises:
            McaError: A rank could not write it.
        """
        while self._stages:
            self._finish_stage()

    def delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint: rename it now and remove it in a thread; not collective."""
        thread = threading.Thread(target=stage_for_removal(checkpoint).remove)
        thread.start()
        self._deletions.append(thread)

    def _wait_for_room(self) -> None:
        while self._deletions:
            self._deletions.pop().join()

    def abandon(self) -> None:
        """Delete the incomplete checkpoint; not collective. Pending writes end with their process."""
        self._wait_for_room()
        if self._shared is not None:
            self._shared.discard()
        self._shared, self._stages = None, []

    @contextlib.contextmanager
    def finishing_on_error(self) -> Iterator[None]:
        """Finish the pending checkpoint before errors of the block end the run, alike on all ranks."""
        try:
            yield
        except McaError:
            self.finish()
            raise

    def _finish_stage(self) -> None:
        with self._cleanup_on_error():
            self._stages[0].finish()
            del self._stages[0]
            if self._shared is not None and not self._stages:
                self._shared.publish()
                self._shared = None
        if not self._stages:
            self.written.append(self._destination)
            self._published()

    @contextlib.contextmanager
    def _cleanup_on_error(self) -> Iterator[None]:
        """Name the checkpoint in errors of the block and delete it."""
        with name_errors(self._destination):
            try:
                yield
            except BaseException:
                self.abandon()
                raise


@contextlib.contextmanager
def name_errors(destination: Path) -> Iterator[None]:
    """Name ``destination`` in errors of the block that writes it, and report a full disk as such.

    Raises:
        McaError: It could not be written.
    """
    try:
        with raise_save_errors():
            yield
    except BaseException as error:
        if is_disk_full(error):
            room = disk_space_hint(error)
            raise DiskFull(
                f"{destination}: cannot be written, the disk is full; make room and resume with "
                f"resume_from_checkpoint auto ({room}{room and '; '}nothing half-written is left)"
            ) from error
        if isinstance(error, McaError) and not str(error).startswith(f"{destination}:"):
            raise McaError(f"{destination}: cannot be written: {error}") from error
        raise


def remove_unfinished(output_dir: Path, prefix: str) -> None:
    """Delete leftovers of killed runs in ``output_dir``, except those of a living process.

    Raises:
        McaError: It cannot be listed.
    """
    with naming_read_errors(output_dir):
        # glob hides errors on Python 3.12
        entries = list(output_dir.iterdir()) if output_dir.is_dir() else []
    leftovers = [entry for entry in entries if fnmatch(entry.name, f"{prefix}-*.partial-*")]
    for leftover in leftovers:
        remove_leftovers(leftover.with_name(leftover.name.split(".partial-")[0]))


@contextmanager
def raise_save_errors() -> Iterator[None]:
    """Make Megatron's saves in the block, and in processes forked there, raise their own errors."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    log = logging.getLogger(filesystem_async.__name__)
    original = FileSystemWriterAsync.write_preloaded_data

    def write(*args: object, **kwargs: object) -> Upstream:
        result = original(*args, **kwargs)
        if result is not None and isinstance(result[1], Exception):
            raise result[1]
        return result

    def is_critical(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    log.addFilter(is_critical)  # setLevel would clear the caches of all loggers, 3 ms each time
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)
        log.removeFilter(is_critical)
