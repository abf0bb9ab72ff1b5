"""Record which functions of the packages each test module reaches, in its forked ranks too.

``MCA_TEST_MAP=FOLDER pytest -p tools.mutation.test_map`` writes one JSON file per process and test module:
``{"module": ..., "seconds": ..., "functions": ["path:first line", ...]}``. A module is the unit because its fixtures
train once what many of its tests look at.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_PREFIX = str(ROOT / "packages")
_exit = os._exit


class _Recorder:
    """The functions that this process has entered since the last test module began."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["MCA_TEST_MAP"])
        self.module = os.environ.get("MCA_TEST_MAP_MODULE", "")
        self.started = time.process_time()
        self.codes: set[CodeType] = set()

    def begin(self, module: str) -> None:
        """Write what the module before has reached, and start with ``module``."""
        if module == self.module:
            return
        self.write()
        self.module = os.environ["MCA_TEST_MAP_MODULE"] = module
        self.started = time.process_time()
        self.codes.clear()

    def entered(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the function of ``frame``: a trace function that traces no lines."""
        self.codes.add(frame.f_code)

    def write(self) -> None:
        """Write one file for this process and module."""
        if not self.module:
            return
        reached = {
            f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            for code in list(self.codes)
            if code.co_filename.startswith(_PREFIX) and "/src/" in code.co_filename
        }
        seconds = time.process_time() - self.started
        record = {"module": self.module, "seconds": seconds, "functions": sorted(reached)}
        name = f"{Path(self.module).stem}-{os.getpid()}-{time.monotonic_ns()}.json"
        unfinished = self.folder / f"{name}.part"  # a rank may be killed while it writes
        unfinished.write_text(json.dumps(record))
        unfinished.rename(self.folder / name)

    def child(self) -> None:
        """Forget, in a forked process, what its parent has entered."""
        self.codes.clear()
        self.started = time.process_time()

    def leave(self, status: int) -> None:
        """Write before a forked process ends without ``atexit``."""
        self.write()
        _exit(status)


def start() -> _Recorder:
    """Trace this process and those it forks."""
    import atexit

    recorder = _Recorder()
    recorder.folder.mkdir(parents=True, exist_ok=True)
    threading.settrace(recorder.entered)
    sys.settrace(recorder.entered)
    os.register_at_fork(after_in_child=recorder.child)
    os._exit = recorder.leave  # type: ignore[assignment]
    atexit.register(recorder.write)
    return recorder


if "MCA_TEST_MAP" in os.environ:
    _RECORDER = start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(item: pytest.Item) -> None:
        """Attribute to the module of ``item`` what is reached from here on."""
        _RECORDER.begin(str(item.path.relative_to(ROOT)))
