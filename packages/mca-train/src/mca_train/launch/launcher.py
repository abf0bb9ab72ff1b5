"""Start and supervision of the local ranks of a run.

Without a GPU the ranks are forked from a process that has imported all modules and read the data, so that
four ranks start as fast as one. With GPUs each rank is a new process, because CUDA does not survive a fork.
If one rank fails, all ranks are ended and its error is printed once.
The run's folder for temporary files is removed at the end or, after a SIGKILL, by the user's next run.
"""

import atexit
import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from mca_config.errors import McaError
from mca_models.storage.staging_folder import StagingFolder, remove_leftovers
from mca_train.launch.environment import LISTENER, listening, rank_environment, threads_per_rank
from mca_train.launch.failures import End, done_mark, explain, report_failure

_LONGEST = 107 - len("/listener-xxxxxxxx")  # bytes of a path of a folder for sockets
_GRACE = 1.0
"""Seconds to collect the exits that distinguish the first failed rank from those that it made fail."""
POLL = 0.02
_LAST_WORDS = 10.0  # seconds in which a failed rank may flush buffers, while the others wait for it
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in the temporary directory, also for the sockets of ``multiprocessing``.

    Raises:
        McaError: The folder cannot be created.
    """
    try:
        parent, name = Path(tempfile.gettempdir()), f"mca-train-{os.getuid()}"
        remove_leftovers(parent / name, logging.DEBUG)
        folder = StagingFolder(parent, name)
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
        waiting = signal.pthread_sigmask(
            signal.SIG_BLOCK, _FORWARDED
        )  # a second Ctrl-C leaves nothing either
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


def fork_ranks(target: Callable[[], None], num_ranks: int, folder: Path) -> int:
    """Run ``target`` in ``num_ranks`` forks of this process; return 0 if all succeed, else an exit code.

    Args:
        target: The work of a rank.
        num_ranks: Number of ranks.
        folder: Empty folder for their output and reports.
    """
    launcher = os.getpid()

    def start(rank: int, environment: dict[str, str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _die_with(launcher)
            _set_up_rank(rank, environment, folder)
            code = report_failure(target, folder, rank)
            if code:
                timer = threading.Timer(_LAST_WORDS, os._exit, (code,))
                timer.daemon = True
                timer.start()
            atexit._run_exitfuncs()  # wandb and others flush their buffers
        finally:
            os._exit(code)

    return _supervise(start, num_ranks, folder)


def spawn_ranks(command: Sequence[str], num_ranks: int, folder: Path) -> int:
    """Run ``command`` as ``num_ranks`` new processes; each must call its work through `report_failure`."""
    launcher = os.getpid()

    def start(rank: int, environment: dict[str, str]) -> int:
        variables = {**os.environ, **environment, "MCA_TRAIN_REPORTS": str(folder)}
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(num_ranks, gpu=True))  # the launcher has one
        with (folder / f"output_{rank}.log").open("wb") as log:
            output = None if rank == 0 else log
            process = subprocess.Popen(
                command,
                env=variables,
                stdout=output,
                stderr=output,
                process_group=0,
                pass_fds=[] if rank else [int(environment[LISTENER])],
                preexec_fn=lambda: _die_with(launcher),
            )
        return process.pid

    return _supervise(start, num_ranks, folder)


def _die_with(launcher: int) -> None:
    """Ask Linux to kill this process when its launcher ends; exit if it has ended already.

    The new process gets the signals again that the launcher blocks while it starts ranks.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _set_up_rank(rank: int, environment: dict[str, str], folder: Path) -> None:
    """Set up a new fork: a separate process group, the rank's variables, and output to a file unless rank 0."""
    atexit._clear()  # exit handlers of the launcher
    os.setpgid(0, 0)  # Ctrl-C reaches only the launcher, which forwards it once
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.update(environment)
    if rank:
        os.close(int(environment[LISTENER]))
        with (folder / f"output_{rank}.log").open("wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())


def _supervise(start: Callable[[int, dict[str, str]], int], num_ranks: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # a signal that arrives while ranks start waits until it can be forwarded to all of them
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        with listening() as listener:
            pids = {
                start(rank, rank_environment(rank, num_ranks, listener)): rank for rank in range(num_ranks)
            }
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        raise
    with _forward_signals(list(pids)) as received:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        ended: list[End] = []
        try:
            ended = _wait(pids, lambda end: end.code != 0 or not done_mark(folder, end.rank).exists())
            ended += _wait(pids, seconds=_GRACE)
        finally:
            killed = bool(pids)
            for pid in pids:
                _signal_group(pid, signal.SIGKILL)
            _wait(pids)
        if killed or any(end.code for end in ended):
            return explain(folder, ended, received)
    return 0


def _wait(
    pids: dict[int, int], is_failure: Callable[[End], bool] = lambda _: False, seconds: float = float("inf")
) -> list[End]:
    """Reap ranks for up to ``seconds`` or until one fails; remove them from ``pids`` and return their exits."""
    ended: list[End] = []
    last = time.monotonic() + seconds
    while pids and time.monotonic() < last and not any(is_failure(end) for end in ended):
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended.append(End(time.time(), pids.pop(pid), os.waitstatus_to_exitcode(status)))
        time.sleep(POLL)
    return ended


@contextmanager
def _forward_signals(pids: Sequence[int]):  # type: ignore[no-untyped-def]
    """Forward SIGTERM, and SIGHUP as SIGTERM, to every rank; SIGINT kills them. Yield the list of received signals."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        for pid in pids:
            _signal_group(pid, signal.SIGKILL if number == signal.SIGINT else signal.SIGTERM)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
    handled = [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return
