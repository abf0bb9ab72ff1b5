"""Failed ranks: their reports for the launcher, and the explanation that it prints.

Signals that end a process before training raise an exception, so that cleanup runs; `mca_train.trainer.sigterm`
handles SIGTERM during training.
"""

import json
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mca_config.errors import McaError, UsageError
from mca_config.redaction import redacted

_LOST = (
    "closed by peer",
    "reset by peer",
    "remote process exited",
    "Broken pipe",
)  # messages of gloo and NCCL

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise `Stopped` on these signals in the block, unless they are ignored (``nohup``)."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    handled = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class _Report:
    """Error text of a failed rank."""

    time: float
    rank: int
    text: str


@dataclass(frozen=True)
class End:
    """Exit of a rank's process, observed at most `POLL` seconds later."""

    time: float
    rank: int
    code: int


def report_failure(target: Callable[[], None], folder: Path | None, rank: int) -> int:
    """Run ``target``, write a failure to ``folder`` for the launcher, or to stderr, and return the exit code."""
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
        trace = traceback.format_exception_only(error)[0] if lost else traceback.format_exc()
        text = f"rank {rank} lost another rank: {trace}" if lost else f"rank {rank} failed:\n{trace}"
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        if folder is not None:
            done_mark(folder, rank).touch()
        return 0
    _publish_report(folder, _Report(time.time(), rank, redacted(text)))
    return code


def _publish_report(folder: Path | None, report: _Report) -> None:
    """Write the report for the launcher, or without its ``folder`` to stderr, where equal texts are printed once."""
    if folder is not None:
        _write_report(folder, report)
    elif _claim_text(report.text):
        sys.stderr.write(report.text.rstrip() + "\n")


def _claim_text(text: str) -> bool:
    """Return whether this rank is the first with ``text``, because all ranks find the same error of a configuration."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return True
    try:
        store = distributed.distributed_c10d._get_default_store()
        return bool(store.add(f"mca/said/{zlib.crc32(text.encode())}", 1) == 1)
    except Exception:  # the store ended with the rank or launcher that served it
        return True


def _write_report(folder: Path, report: _Report) -> None:
    path = folder / f"report_{report.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps([report.time, report.rank, report.text]))
    path.with_suffix(".tmp").rename(path)


def done_mark(folder: Path, rank: int) -> Path:
    """Return the path of the file that marks a rank's work as complete."""
    return folder / f"done_{rank}"


def explain(folder: Path, ended: Sequence[End], received: Sequence[int]) -> int:
    """Print the failure of the rank that made the others fail, and return the launcher's exit code."""
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
    """Return the first rank that ended without a report, unless another failed rank was the cause.

    A rank that loses its peer fails with a report, or the communication library aborts it.
    """
    reported = {report.rank for report in reports}
    failed = [end for end in ended if end.code or not done_mark(folder, end.rank).exists()]
    silent = [end for end in failed if end.rank not in reported]
    aborted = [end for end in silent if end.code == -signal.SIGABRT]
    causes = [end for end in silent if end not in aborted]
    return next(iter(causes or ([] if reports else aborted)), None)


def _tail(folder: Path, rank: int, lines: int = 20) -> str:
    path = folder / f"output_{rank}.log"
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    return "".join(f"[rank {rank}] {line}\n" for line in text)
