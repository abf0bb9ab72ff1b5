"""Starts the local ranks of a run and looks after them.

Without a GPU the ranks are forked from a process that has imported everything and read the data, so that
four ranks start as fast as one. With GPUs each rank is a new process, because CUDA does not survive a fork.
One failing rank brings all down; what it said is printed once.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mca_config.errors import McaError, UsageError
from mca_train.rendezvous import LISTENER, listening
from mca_train.stopping import Stopped

_GRACE = 1.0  # seconds in which the rank that failed first can be told from those that it pulled down
_POLL = 0.02
_PR_SET_PDEATHSIG = 1
_LOST = (
    "closed by peer",
    "reset by peer",
    "remote process exited",
    "Broken pipe",
)  # gloo's words, and nccl's
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Report:
    """What a rank said when it failed."""

    time: float
    rank: int
    text: str


@dataclass(frozen=True)
class _End:
    """How a rank's process ended, seen at most `_POLL` later."""

    time: float
    rank: int
    code: int


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (or SLURM, or this module) started this process as one of several ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def one_thread_until_forked() -> None:
    """Keeps torch to one thread in the launcher: a pool of threads does not survive a fork.

    To be called before torch is imported. What the user asked for (OMP_NUM_THREADS) holds in the ranks.
    """
    os.environ.setdefault("MCA_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks that spin take the cores from those that work


def threads_per_rank(ranks: int) -> int:
    """Threads for a rank on a machine without a GPU: what the user asked for, else its share of the cores.

    A share of two or three gains nothing on small models and costs up to 30 times on a busy machine.
    """
    asked = os.environ.get("MCA_THREADS", "")
    share = len(os.sched_getaffinity(0)) // ranks
    return int(asked) if asked.isdigit() else share if share >= 4 else 1


def rank_environment(rank: int, num_ranks: int, listener: socket.socket) -> dict[str, str]:
    """The variables by which a rank finds the others, at the port of ``listener``."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        LISTENER: str(listener.fileno()),
        "TOKENIZERS_PARALLELISM": "false",
    }


def fork_ranks(target: Callable[[], None], num_ranks: int, folder: Path) -> int:
    """Runs ``target`` in ``num_ranks`` forks of this process; 0 if all succeed, else an exit code.

    Args:
        target: The work of a rank.
        num_ranks: How many.
        folder: For what they say; empty.
    """
    launcher = os.getpid()

    def start(rank: int, environment: dict[str, str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _die_with(launcher)
            _become_rank(rank, environment, folder)
            code = report_failure(target, folder, rank)
        finally:
            os._exit(code)

    return _supervise(start, num_ranks, folder)


def spawn_ranks(command: Sequence[str], num_ranks: int, folder: Path) -> int:
    """Runs ``command`` as ``num_ranks`` new processes; each must call its work through `report_failure`."""
    launcher = os.getpid()

    def start(rank: int, environment: dict[str, str]) -> int:
        variables = {**os.environ, **environment, "MCA_TRAIN_REPORTS": str(folder)}
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
    """Asks Linux to kill this process when its launcher ends, however it ends; it may have ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _become_rank(rank: int, environment: dict[str, str], folder: Path) -> None:
    """In a fresh fork: a process group of its own, the rank's variables, and silence unless rank 0."""
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher only, which passes it on once
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


def report_failure(target: Callable[[], None], folder: Path | None, rank: int) -> int:
    """Runs ``target``; a failure goes to ``folder`` for the launcher to print, or to stderr. The exit code."""
    code = 1
    try:
        target()
    except (Stopped, KeyboardInterrupt) as stop:
        code = getattr(stop, "code", 130)
        text = str(stop) or "stopped by SIGINT"
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        text = f"error: {stop.code}"
    except UsageError as error:
        text, code = f"error: {error}", 2
    except McaError as error:
        text = f"error: {error}"
    except BaseException as error:
        lost = any(words in str(error) for words in _LOST)
        told = traceback.format_exception_only(error)[0] if lost else traceback.format_exc()
        text = f"rank {rank} lost another rank: {told}" if lost else f"rank {rank} failed:\n{told}"
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        if folder is not None:
            _done_mark(folder, rank).touch()
        return 0
    if folder is None:
        sys.stderr.write(text.rstrip() + "\n")
    else:
        _write_report(folder, _Report(time.time(), rank, text))
    return code


def _write_report(folder: Path, report: _Report) -> None:
    path = folder / f"report_{report.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps([report.time, report.rank, report.text]))
    path.with_suffix(".tmp").rename(path)


def _done_mark(folder: Path, rank: int) -> Path:
    """A file that says that a rank's work was done before its process ended."""
    return folder / f"done_{rank}"


def _supervise(start: Callable[[int, dict[str, str]], int], num_ranks: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with listening() as listener:
        pids = {start(rank, rank_environment(rank, num_ranks, listener)): rank for rank in range(num_ranks)}
    with _forward_signals(list(pids)) as received:
        ended: list[_End] = []
        try:
            ended = _wait(pids, lambda end: end.code != 0 or not _done_mark(folder, end.rank).exists())
            ended += _wait(pids, seconds=_GRACE)
        finally:
            killed = bool(pids)
            for pid in pids:
                _signal_group(pid, signal.SIGKILL)
            _wait(pids)
        if killed or any(end.code for end in ended):
            return _explain(folder, ended, received)
    return 0


def _wait(
    pids: dict[int, int],
    is_failure: Callable[[_End], bool] = lambda _: False,
    seconds: float = float("inf"),
) -> list[_End]:
    """Reaps ranks for up to ``seconds`` or until one failed; drops them from ``pids`` and says how they ended."""
    ended: list[_End] = []
    last = time.monotonic() + seconds
    while pids and time.monotonic() < last and not any(is_failure(end) for end in ended):
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended.append(_End(time.time(), pids.pop(pid), os.waitstatus_to_exitcode(status)))
        time.sleep(_POLL)
    return ended


@contextlib.contextmanager
def _forward_signals(pids: Sequence[int]):  # type: ignore[no-untyped-def]
    """SIGTERM goes on to every rank, and SIGHUP as SIGTERM; SIGINT ends them. Yields the list of signals that came."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        for pid in pids:
            _signal_group(pid, signal.SIGKILL if number == signal.SIGINT else signal.SIGTERM)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
    heard = [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return


def _explain(folder: Path, ended: Sequence[_End], received: Sequence[int]) -> int:
    """Prints why the rank failed that pulled down the others, and returns the launcher's exit code."""
    if received:
        name = signal.Signals(received[0]).name
        sys.stderr.write(f"stopped by {name}\n")
        return 128 + received[0]
    reports = sorted(
        (_Report(*json.loads(path.read_text())) for path in folder.glob("report_*.json")),
        key=lambda report: report.time,
    )
    cause = _silent(folder, ended, reports)
    if cause is None:
        sys.stderr.write(reports[0].text.rstrip() + "\n")
        return next((end.code for end in ended if end.rank == reports[0].rank and end.code > 0), 1)
    rank, code = cause.rank, cause.code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    sys.stderr.write(f"error: rank {rank} {how} without a report\n{_tail(folder, rank)}")
    for report in reports[:1]:
        sys.stderr.write(f"then {report.text.rstrip().splitlines()[-1]}\n")
    return code if code > 0 else 1


def _silent(folder: Path, ended: Sequence[_End], reports: Sequence[_Report]) -> _End | None:
    """The first rank that died without a word, unless it did so because another one had failed.

    A rank whose peer is gone fails with a report of that, or is aborted by the communication library.
    """
    told = {report.rank for report in reports}
    failed = [end for end in ended if end.code or not _done_mark(folder, end.rank).exists()]
    silent = [end for end in failed if end.rank not in told]
    aborted = [end for end in silent if end.code == -signal.SIGABRT]
    own = [end for end in silent if end not in aborted]
    return next(iter(own or ([] if reports else aborted)), None)


def _tail(folder: Path, rank: int, lines: int = 20) -> str:
    path = folder / f"output_{rank}.log"
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    return "".join(f"[rank {rank}] {line}\n" for line in text)
