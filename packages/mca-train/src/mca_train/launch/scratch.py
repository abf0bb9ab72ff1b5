"""A run's folder for temporary files: removed with the run or, where that was killed, by the next one of the user.

It carries the marker and the lock of `PartialFolder`, so that only what a dead run left is ever taken for left behind.
"""

import importlib
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mca_config.errors import McaError
from mca_models.storage.partial_folder import PartialFolder, remove_leftovers

_LONGEST = 107 - len("/listener-xxxxxxxx")  # bytes of a folder with sockets in it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in the temporary directory, where the sockets of ``multiprocessing`` are too.

    Raises:
        McaError: It cannot be made.
    """
    try:
        place, name = Path(tempfile.gettempdir()), f"mca-train-{os.getuid()}"
        remove_leftovers(place / name)
        folder = PartialFolder(place, name)
        folder.path.chmod(0o700)
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        reason = error.strerror or str(error)
        raise McaError(
            f"temporary directory {where}: cannot be written ({reason}); set TMPDIR to another"
        ) from error
    try:
        with _sockets_in(folder.path):
            yield folder.path
    finally:
        waiting = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a second Ctrl-C leaves nothing either
        folder.remove()
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """Has managers and queues of this process, and of its forks, use ``folder``: else each makes a ``pymp-*``.

    A process that is killed does not remove that; ``multiprocess`` is what `datasets` uses in its place.
    """
    if len(os.fsencode(folder)) > _LONGEST:
        yield
        return
    settings = []
    for name in ("multiprocessing.process", "multiprocess.process"):
        with suppress(ImportError):
            settings.append(importlib.import_module(name).current_process()._config)
    before = [setting.get("tempdir") for setting in settings]
    for setting in settings:
        setting["tempdir"] = str(folder)
    try:
        yield
    finally:
        for setting, folder_before in zip(settings, before, strict=True):
            setting["tempdir"] = folder_before
