"""Keep the tests of a module in one xdist worker: they share its process groups, models and fixtures.

The workers take the groups in the order of collection, so the longest modules come first (`DURATIONS`), and no worker
is left alone with one at the end. ``pytest -m fork`` chooses what depends on Megatron's version.

Everything is computed on the CPU, also where there is a GPU: a process that has asked CUDA anything cannot fork ranks
that use it. ``MCA_DEVICE=cuda pytest -m gpu`` runs the tests of a GPU, and those alone.
"""

import atexit
import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import resource
import signal
import stat
import sys
from collections import Counter
from collections.abc import Generator
from functools import cache, partial, wraps
from pathlib import Path

os.environ.setdefault("MCA_DEVICE", "cpu")  # before anything asks; what tests start inherits it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before libgomp is loaded: idle threads of a busy machine spin
with contextlib.suppress(
    OSError
):  # gloo's threads spin where one that holds a connection's lock is interrupted
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # what wakes up interrupts nobody
if os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
):  # torch, Megatron and transformers anew: 6 s in every process
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False


import pytest
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "integration_tests" / "support"))
from case_selector import is_default, unknown_ids


def catch_ignored_signals() -> None:
    """Let what tests start have the default dispositions, also where ``nohup`` or ``&`` had these signals ignored.

    A caught signal has its default disposition again after ``exec``; an ignored one stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a terminal that closes still ends no test run


def capture_root_logger_only() -> None:
    """Let pytest capture logs of the root logger alone, 0.1 ms faster six times in each of 9,500 tests.

    pytest 9.1 adds its handlers to every logger that does not propagate as well: torch has 60, and no test reads them.
    """
    enter = catching_logs.__enter__

    @wraps(enter)
    def enter_root(self: catching_logs[logging.Handler]) -> logging.Handler:
        manager = logging.getLogger().manager
        with logging._lock:  # type: ignore[attr-defined]  # another thread creates no logger meanwhile
            known, manager.loggerDict = manager.loggerDict, {}
            try:
                return enter(self)
            finally:
                manager.loggerDict = known

    catching_logs.__enter__ = enter_root  # type: ignore[method-assign]


def check_descriptor(descriptor: int) -> None:
    """Fail as `os.fsync` does for what is no open file, and wait for no disk: no test cuts the power."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    if stat.S_ISFIFO(mode := os.fstat(descriptor).st_mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


catch_ignored_signals()
os.fsync = check_descriptor
capture_root_logger_only()
settings.register_profile("mca", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("mca")  # where others compute beside the tests, time says nothing of them
gc.disable()  # until all is imported and collected: none of it is garbage
atexit.register(gc.unfreeze)  # libraries free at exit what they imported: some report what is left

_ON_GPU = os.environ["MCA_DEVICE"] == "cuda"
_OTHER = {
    "ranks": (_ON_GPU, "forked ranks compute on the CPU; unset MCA_DEVICE"),
    "gpu": (
        not _ON_GPU and not os.environ.get("MCA_GPU_REHEARSAL"),
        "needs a CUDA device: MCA_DEVICE=cuda pytest -m gpu",
    ),
    "slurm": (not os.environ.get("MCA_SLURM"), "starts a SLURM on this machine: MCA_SLURM=1 pytest -m slurm"),
}

DURATIONS = Path(__file__).parent / "integration_tests" / "support" / "durations.json"
"""CPU seconds of each test module in a run of the default tests: `--record-durations` writes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cases``."""
    parser.addoption(
        "--cases",
        choices=("default", "all"),
        default="default",
        help="default: of each test marked cases(n), one case in n and the named ones; all: every case",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write CPU seconds of each module to {DURATIONS.name}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Deselect nothing with ``--cases all``; let workers end without freeing what they imported, which takes 2 s."""
    if hasattr(config, "workerinput"):
        atexit.register(lambda: os._exit(0))  # called last: what libraries register later is called before
    if config.option.cases == "all" and config.option.markexpr == "not qualify":
        config.option.markexpr = ""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str
) -> Generator[None, object, object]:
    """Mark the cases that do not run by default."""
    collected = yield
    if isinstance(collected, list):
        mark_cases(collector, name, [item for item in collected if isinstance(item, pytest.Function)])
    return collected


def mark_cases(collector: pytest.Module | pytest.Class, name: str, items: list[pytest.Function]) -> None:
    """Mark with ``qualify`` what `is_default` leaves out of a test's cases; unknown ids in ``always`` are an error."""
    mark = items[0].get_closest_marker("cases") if items else None
    if mark is None:
        return
    (one_in,), always = mark.args, mark.kwargs.get("always", ())
    ids = [item.callspec.id for item in items]
    if unknown := unknown_ids(ids, always):
        raise collector.CollectError(
            f"{name}: cases({one_in}, always=...) names {', '.join(unknown)}; expected one of {', '.join(ids)}"
        )
    for item, case_id in zip(items, ids, strict=True):
        if not is_default(collector.path.stem, case_id, one_in, always):
            item.add_marker(pytest.mark.qualify)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of a module one group; skips what the chosen device is not for."""
    items.sort(key=partial(_turn, json.loads(DURATIONS.read_text())))  # a stable sort
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if "ranks" in marks and "one_fork" not in marks:
            item.add_marker(pytest.mark.fork)
        for mark, (skipped, reason) in _OTHER.items():
            if skipped and mark in marks:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import Megatron if a test will; leave what is imported out of every later search for garbage."""
    if not session.config.option.collectonly and not _ON_GPU and any(map(_prepares_megatron, session.items)):
        from mca_models.megatron import platform

        platform.prepare()  # fails if a test before has imported Megatron otherwise
    gc.freeze()
    gc.enable()
    _UNTIL[0] = _cpu_seconds()


def _prepares_megatron(item: pytest.Item) -> bool:
    """Return whether ``item`` forks ranks, or its module prepares Megatron by itself."""
    return item.get_closest_marker("ranks") is not None or _calls_prepare(item.path)


@cache
def _calls_prepare(path: Path) -> bool:
    return "platform.prepare()" in path.read_text()


def _turn(durations: dict[str, float], item: pytest.Item) -> tuple[float, bool]:
    """The longest modules first; of those that are new, the ones that fork ranks."""
    return -durations.get(item.path.stem, 0.0), item.get_closest_marker("ranks") is None


SECONDS: Counter[str] = Counter()
"""Module -> CPU seconds that its tests took in this run, forked ranks included."""
_SPENT = "cpu seconds"
_UNTIL = [0.0]


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the CPU seconds since the report before, which other work on the machine hardly changes."""
    report = yield
    now = _cpu_seconds()
    report.user_properties.append((_SPENT, now - _UNTIL[0]))
    _UNTIL[0] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up setup, call and teardown of each test of a module."""
    SECONDS[report.location[0].rpartition("/")[2].removesuffix(".py")] += sum(
        float(value) for name, value in report.user_properties if name == _SPENT and isinstance(value, float)
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what `--record-durations` asks for; with xdist, in the process that starts the workers."""
    if session.config.option.record_durations and not hasattr(session.config, "workerinput"):
        longest = {name: round(seconds) for name, seconds in SECONDS.most_common() if seconds >= 1.5}
        DURATIONS.write_text(json.dumps(longest, indent=0) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU seconds of all tests: the default run should have at most 450."""
    terminalreporter.write_line(f"{sum(SECONDS.values()):.0f} CPU seconds of tests")
