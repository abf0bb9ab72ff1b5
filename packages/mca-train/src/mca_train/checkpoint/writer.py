"""Checkpoints on their way to disk: written at once, or in the background while training goes on.

A checkpoint is written in stages, one after another: the weights, the optimizer, then sizes and checksums of all files.
In the background each stage runs beside the training steps, and after every step the ranks agree on whether it is over.
Whichever way, all ranks write into a directory beside the destination, which is renamed when the last stage is.
Checkpoints that are one too many go in a thread, once a newer one is complete.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mca_config.errors import DiskFull, McaError
from mca_config.files import naming_read_errors
from mca_models.megatron.distributed.collectives import SharedDirectory, disk_space_hint, is_disk_full
from mca_models.storage.partial_folder import remove_leftovers, retire
from mca_train.types import Upstream


class WriteStage(Protocol):
    """Something that is being written; both methods are collective."""

    def done(self) -> bool:
        """Whether `finish` need not wait; the same on every rank."""

    def finish(self) -> object:
        """Waits until it is on disk."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time; every method is collective.

    Args:
        in_background: Return from `write` when everything is copied, and write while training goes on. Otherwise
            when the checkpoint is there.
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
        """Begins a checkpoint, once the one before it is complete.

        Args:
            destination: Replaced if it exists.
            begin: Begins to write into a directory that all ranks see; the stages to come, first one first.
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
        """Publishes the checkpoint that is being written, if it is; to be called after every step.

        Raises:
            McaError: A rank could not write it.
        """
        while self._stages and self._is_done(self._stages[0]):
            self._finish_stage()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is published.

        Raises:
            McaError: A rank could not write it.
        """
        while self._stages:
            self._finish_stage()

    def delete(self, checkpoint: Path) -> None:
        """Removes a checkpoint, which at no moment is half of one: renamed now, gone by the next; not collective."""
        thread = threading.Thread(target=retire(checkpoint).remove)
        thread.start()
        self._deletions.append(thread)

    def _wait_for_room(self) -> None:
        while self._deletions:
            self._deletions.pop().join()

    def abandon(self) -> None:
        """Removes what is not complete; not collective. What still writes ends with its process."""
        self._wait_for_room()
        if self._shared is not None:
            self._shared.discard()
        self._shared, self._stages = None, []

    def _is_done(self, stage: WriteStage) -> bool:
        with self._cleanup_on_error():
            return stage.done()

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
        """Errors inside name the checkpoint and remove it."""
        with name_errors(self._destination):
            try:
                yield
            except BaseException:
                self.abandon()
                raise


@contextlib.contextmanager
def name_errors(destination: Path) -> Iterator[None]:
    """A block that writes ``destination``: its errors name it, and a full disk is called by its name.

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
    """Removes what killed runs left in ``output_dir``; what a living process is writing stays.

    Raises:
        McaError: It cannot be listed.
    """
    with naming_read_errors(output_dir):
        found = list(output_dir.glob(f"{prefix}-*.partial-*"))
    for leftover in found:
        remove_leftovers(leftover.with_name(leftover.name.split(".partial-")[0]))


@contextmanager
def raise_save_errors() -> Iterator[None]:
    """A block in which saves that begin, here or in processes forked here, fail in their own words."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    log = logging.getLogger(filesystem_async.__name__)
    level = log.level
    original = FileSystemWriterAsync.write_preloaded_data

    def write(*args: object, **kwargs: object) -> Upstream:
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
