"""What a rank that fails leaves for the launcher to print, and how its end is explained. It ends no process."""

import json
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mca_config.errors import McaError, UsageError
from mca_config.redaction import redacted
from mca_train.launch.stop_signals import Stopped

_LOST = (
    "closed by peer",
    "reset by peer",
    "remote process exited",
    "Broken pipe",
)  # gloo's words, and nccl's


@dataclass(frozen=True)
class _Report:
    """What a rank said when it failed."""

    time: float
    rank: int
    text: str


@dataclass(frozen=True)
class End:
    """How a rank's process ended, seen at most `POLL` later."""

    time: float
    rank: int
    code: int


def report_failure(target: Callable[[], None], folder: Path | None, rank: int) -> int:
    """Run ``target``; a failure goes to ``folder`` for the launcher to print, or to stderr. The exit code."""
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
            done_mark(folder, rank).touch()
        return 0
    _publish_report(folder, _Report(time.time(), rank, redacted(text)))
    return code


def _publish_report(folder: Path | None, report: _Report) -> None:
    """For the launcher to print; without its ``folder`` to stderr, where each thing is said once."""
    if folder is not None:
        _write_report(folder, report)
    elif _claim_text(report.text):
        sys.stderr.write(report.text.rstrip() + "\n")


def _claim_text(text: str) -> bool:
    """Return whether no rank has said the same before: all find what is wrong with a configuration, one reports it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return True
    try:
        store = distributed.distributed_c10d._get_default_store()
        return bool(store.add(f"mca/said/{zlib.crc32(text.encode())}", 1) == 1)
    except Exception:  # the store is gone with the rank or the launcher that kept it
        return True


def _write_report(folder: Path, report: _Report) -> None:
    path = folder / f"report_{report.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps([report.time, report.rank, report.text]))
    path.with_suffix(".tmp").rename(path)


def done_mark(folder: Path, rank: int) -> Path:
    """A file that says that a rank's work was done before its process ended."""
    return folder / f"done_{rank}"


def explain(folder: Path, ended: Sequence[End], received: Sequence[int]) -> int:
    """Print why the rank failed that pulled down the others, and returns the launcher's exit code."""
    if received:
        name = signal.Signals(received[0]).name
        sys.stderr.write(f"stopped by {name}\n")
        return 128 + received[0]
    reports = sorted(
        (_Report(*json.loads(path.read_text())) for path in folder.glob("report_*.json")),
        key=lambda report: report.time,
    )
    cause = _find_silent_failure(folder, ended, reports)
    if cause is None:
        sys.stderr.write(reports[0].text.rstrip() + "\n")
        return next((end.code for end in ended if end.rank == reports[0].rank and end.code > 0), 1)
    rank, code = cause.rank, cause.code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    sys.stderr.write(f"error: rank {rank} {how} without a report\n{_tail(folder, rank)}")
    for report in reports[:1]:
        sys.stderr.write(f"then {report.text.rstrip().splitlines()[-1]}\n")
    return code if code > 0 else 1


def _find_silent_failure(folder: Path, ended: Sequence[End], reports: Sequence[_Report]) -> End | None:
    """The first rank that died without a word, unless it did so because another one had failed.

    A rank whose peer is gone fails with a report of that, or is aborted by the communication library.
    """
    told = {report.rank for report in reports}
    failed = [end for end in ended if end.code or not done_mark(folder, end.rank).exists()]
    silent = [end for end in failed if end.rank not in told]
    aborted = [end for end in silent if end.code == -signal.SIGABRT]
    own = [end for end in silent if end not in aborted]
    return next(iter(own or ([] if reports else aborted)), None)


def _tail(folder: Path, rank: int, lines: int = 20) -> str:
    path = folder / f"output_{rank}.log"
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    return "".join(f"[rank {rank}] {line}\n" for line in text)
