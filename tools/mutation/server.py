"""Run chosen tests in forks of a process that has imported and collected everything, with a fault planted in each.

``MCA_MUTATE_PIPES=READ,WRITE pytest -p tools.mutation.server`` collects and then answers requests, one JSON object a
line: ``{"path", "file", "tests", "limits"}`` is the source file, a file with its faulty text (or nothing), the ids of
the tests and how many seconds each may take. The answer has ``test``, the first that failed (or nothing), and
``detail``. A fork costs milliseconds where a new process imports for ten seconds.

The fault is planted in the functions that exist: their code is replaced. A function that was called while modules
were imported or tests collected has had its effect, so the first line lists those (``entered``): if a fault in them
survives, it needs a new process. It lists the ids of all tests too (``tests``). ``unplanted`` is answered where a
function cannot take the code.
"""

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from ctypes import CDLL
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tools.mutation.recorder import ROOT, Recorder, names_of

_PR_SET_CHILD_SUBREAPER = 36
_RECORDER = Recorder()


class Server:
    """Answers requests between collection and the end of the session."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        self.functions = _functions()
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure, in the fork."""
        if report.failed:
            self.failed = report.longreprtext.strip().rpartition("\n")[2]

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        """Fork, and watch the fork until a test fails or all have passed."""
        read, write = os.pipe()
        folder = tempfile.mkdtemp(prefix="mca-mutate-")
        child = os.fork()
        if child == 0:
            os.close(read)
            self._serve(request, write, Path(folder))
        os.close(write)
        try:
            return _watched(read, request)
        finally:
            os.close(read)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _end_descendants()
            shutil.rmtree(folder, ignore_errors=True)

    def _serve(self, request: dict[str, Any], write: int, folder: Path) -> None:
        """Run the tests in the forked process; never returns."""
        try:
            os.setpgid(0, 0)  # not a session, which has its own share of a busy machine
            gc.disable()
            self.session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            if request["file"] and not self._plant(request["path"], Path(request["file"]).read_bytes()):
                _tell(write, unplanted="the function cannot take the code")
                os._exit(0)
            tests = [self.items[name] for name in request["tests"] if name in self.items]
            for item, following in zip(tests, [*tests[1:], None], strict=False):
                _tell(write, begins=item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed:
                    _tell(write, test=item.nodeid, detail=self.failed)
                    os._exit(0)
            _tell(write, test="", detail="")
        except BaseException as error:
            _tell(write, test="(the process)", detail=repr(error))
        finally:
            os._exit(0)

    def _plant(self, path: str, source: bytes) -> bool:
        """Give the functions of the file ``path`` the code that ``source`` has for them."""
        codes: dict[tuple[str, int], CodeType] = {}
        waiting = [compile(source, str(ROOT / path), "exec")]
        while waiting:
            for each in waiting.pop().co_consts:
                if isinstance(each, CodeType):
                    codes[each.co_qualname, each.co_firstlineno] = each
                    waiting.append(each)
        for function in self.functions.get(str(ROOT / path), []):
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno), old)
            if new.co_freevars != old.co_freevars:
                return False
            if new != old:
                function.__code__ = new
        return True


def _functions() -> dict[str, list[FunctionType]]:
    """Return the functions of the packages by file."""
    found: dict[str, list[FunctionType]] = {}
    prefix = str(ROOT / "packages")
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(prefix):
            found.setdefault(each.__code__.co_filename, []).append(each)
    gc.freeze()
    return found


def _tell(write: int, **words: str) -> None:
    os.write(write, json.dumps(words).encode() + b"\n")


def _watched(read: int, request: dict[str, Any]) -> dict[str, str]:
    """Return what the fork answers; a test that takes too long or ends the process has failed."""
    limits = dict(zip(request["tests"], request["limits"], strict=True))
    test, deadline, received = "", time.monotonic() + 60, b""
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return {"test": test, "detail": "(time-out)"}
        some = os.read(read, 65536)
        if not some:
            return {"test": test, "detail": "(the process ended)"}
        *lines, received = (received + some).split(b"\n")
        for line in lines:
            words: dict[str, str] = json.loads(line)
            if "begins" not in words:
                return words
            test = words["begins"]
            deadline = time.monotonic() + limits[test]


def _end_descendants() -> None:
    """Kill and reap what a fork has left: this process adopts what loses its parent."""
    while True:
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            if not pids:
                return


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Answer requests in place of running the tests."""
    if "MCA_MUTATE_PIPES" not in os.environ:
        return None
    read, write = map(int, os.environ["MCA_MUTATE_PIPES"].split(","))
    with contextlib.suppress(ImportError):
        from harness import prepare_parent  # type: ignore[import-not-found]

        prepare_parent()
    sys.settrace(None)
    CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = Server(session)
    session.config.pluginmanager.register(server)
    _answer(write, {"entered": names_of(_RECORDER.codes), "tests": list(server.items)})
    with os.fdopen(read) as requests:
        for line in requests:
            _answer(write, server.answer(json.loads(line)))
    return True


def _answer(write: int, words: dict[str, Any]) -> None:
    """Write one line, however long."""
    with os.fdopen(os.dup(write), "w") as file:
        file.write(json.dumps(words) + "\n")


if "MCA_MUTATE_PIPES" in os.environ:
    sys.settrace(_RECORDER.entered)
