"""Lock that allows one run at a time in an ``output_dir``, released with the processes that hold it.

``<output_dir>/.mca-train.lock`` is locked with ``flock``. Forked ranks inherit the lock, so the last of them releases
it. Some file systems (mounts of NFS, Lustre, FUSE) keep such locks to one machine, or have none. There the record in
the file decides: a run on another machine takes the directory over, so that a job that is requeued after a lost node
goes on at once. The earlier run, if it is alive, compares the record before it saves, and ends without writing.
"""

import fcntl
import json
import logging
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import parse_record
from mca_config.types import JsonObject

logger = logging.getLogger(__name__)

NAME = ".mca-train.lock"
_LINGER = 10.0  # seconds; data loaders inherit the lock and notice after 5 that their rank was killed
_POLL = 0.2


class OutputLock:
    """Lock of one run; its launcher or its first rank calls `take`, other ranks do not.

    Args:
        output_dir: Created if missing; removed again if it stays empty.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir, self._path = output_dir, output_dir / NAME
        self._fd: int | None = None
        self._made: list[Path] = []
        self._record: JsonObject = {}

    def take(self) -> None:
        """Take the lock.

        Raises:
            McaError: Another run has it, or it cannot be written.
        """
        self._made = [path for path in (self._output_dir, *self._output_dir.parents) if not path.exists()]
        try:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            self._fd = self._locked()
            self._record = _record()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(self._record).encode(), 0)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise McaError(f"output_dir: {self._path} cannot be written ({reason})") from error
            raise

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            try:
                if _is_same(self._fd, self._path) and _read(self._path) in ({}, self._record):
                    self._path.unlink()
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning(
                    "%s cannot be deleted; the next run takes it over (%s)", self._path, error.strerror
                )
            with suppress(OSError):  # closed anyway
                os.close(self._fd)
            self._fd = None
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def verify(self) -> None:
        """Raise if a run on another machine, which does not see the lock, may have taken the directory since.

        Raises:
            McaError: It has, or the record of this run is gone or cannot be read.
        """
        if self._fd is None:
            return
        try:
            record = parse_record(self._path.read_text(errors="replace"))
        except FileNotFoundError:
            raise McaError(
                f"output_dir: {self._path} was removed, so another run may use the directory; this run ends"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise McaError(
                f"output_dir: {self._path} cannot be read ({reason}), so another run may use the directory; "
                "this run ends"
            ) from error
        if record != self._record:
            raise McaError(f"output_dir: {self._output_dir} was taken by {_describe(record)}; this run ends")

    def _locked(self) -> int:
        """Return the file, opened and locked, once no other process holds it."""
        last = time.monotonic() + _LINGER
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                is_locked, record = _lock(fd), _read(self._path)
                if is_locked is not True and _is_alive(record):
                    raise self._in_use(record)
                if is_locked is False and time.monotonic() > last:
                    raise self._in_use(record)
                if is_locked is not False and _is_at(fd, self._path):
                    if record and record.get("boot") != _record()["boot"]:
                        logger.warning(
                            "%s: taken over from %s; that run ends at its next save if it is alive",
                            self._path,
                            _describe(record),
                        )
                    return os.dup(fd)
            finally:
                os.close(fd)
            time.sleep(_POLL)

    def _in_use(self, record: JsonObject) -> McaError:
        return McaError(
            f"output_dir: {self._output_dir} is used by {_describe(record)}; wait until it has ended, or set another "
            "directory"
        )


def _record() -> JsonObject:
    """Return the record of this process; ``boot`` identifies the running kernel."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {
            "process": os.getpid(),
            "started": _start_time(os.getpid()),
            "machine": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "boot": boot,
        }
    return {"process": os.getpid(), "machine": platform.node(), "boot": ""}


def _read(path: Path) -> JsonObject:
    with suppress(OSError):
        return parse_record(path.read_text(errors="replace"))
    return {}


def _describe(record: JsonObject) -> str:
    if not record:
        return "another run"
    return f"another run (process {record.get('process')} on {record.get('machine')}, since {record.get('since')})"


def _is_alive(record: JsonObject) -> bool:
    """Return True if the process that wrote ``record`` is alive on this machine."""
    started = record.get("started")
    here = record.get("boot") == _record()["boot"]
    return here and bool(started) and started == _start_time(record.get("process"))


def _start_time(process: object) -> str:
    """Return a process's start time in ticks since boot; empty if there is none."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _lock(fd: int) -> bool | None:
    """Lock the file: True if it succeeded, False if another process holds it, None without lock support."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return _is_same(fd, path)
    except OSError:
        return False


def _is_same(fd: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(fd), path.stat())
