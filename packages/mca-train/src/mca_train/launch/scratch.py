"""A run's folder for temporary files: removed at the end or, after a SIGKILL, by the user's next run.

The folder has the marker and the lock of `PartialFolder`, so that only folders of ended runs are removed.
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

_LONGEST = 107 - len("/listener-xxxxxxxx")  # bytes of a path of a folder for sockets
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in the temporary directory, also for the sockets of ``multiprocessing``.

    Raises:
        McaError: The folder cannot be created.
    """
    try:
        parent, name = Path(tempfile.gettempdir()), f"mca-train-{os.getuid()}"
        remove_leftovers(parent / name)
        folder = PartialFolder(parent, name)
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
    """Make managers and queues of this process and its forks use ``folder`` instead of a ``pymp-*`` folder.

    A killed process does not remove its ``pymp-*`` folder. `datasets` uses ``multiprocess``.
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
