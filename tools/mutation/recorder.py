"""Record which functions of the packages each test reaches, in its forked ranks too.

``MCA_TEST_MAP=FOLDER pytest -p tools.mutation.recorder`` writes one JSON file per process and test module, a list of
records ``{"module", "key", "seconds", "functions": ["path:qualified name", ...], "uses": [keys]}``. A key is the id of
a test or of a fixture that several tests share: what such a fixture computes counts for each test that uses it.
"""

import json
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_PREFIX = str(ROOT / "packages")
_exit = os._exit


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def names_of(codes: set[CodeType]) -> list[str]:
    """Return ``path:qualified name`` of each code object of the packages."""
    return sorted(
        f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        for code in list(codes)
        if code.co_filename.startswith(_PREFIX) and "/src/" in code.co_filename
    )


class Recorder:
    """The functions that this process has entered, by test or shared fixture."""

    def __init__(self) -> None:
        self.module = ""
        self.key = ""
        self.forked = False
        self.since = cpu_seconds()
        self.codes: set[CodeType] = set()
        self.reached: dict[str, set[CodeType]] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.uses: dict[str, list[str]] = {}

    def switch(self, key: str) -> str:
        """Attribute to ``key`` what is entered from here on; return the key before."""
        now = cpu_seconds()
        self.seconds[self.key] += now - self.since
        self.since, before, self.key = now, self.key, key
        self.codes = self.reached.setdefault(key, set())
        return before

    def entered(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the function of ``frame``: a trace function that traces no lines."""
        self.codes.add(frame.f_code)

    def write(self) -> None:
        """Write one file for this process and module, and forget what it says."""
        self.switch(self.key)
        records = [
            {
                "module": self.module,
                "key": key,
                "seconds": 0.0 if self.forked else self.seconds[key],  # its parent counts them
                "functions": names_of(codes),
                "uses": self.uses.get(key, []),
            }
            for key, codes in self.reached.items()
            if key
        ]
        self.forget()
        folder = Path(os.environ["MCA_TEST_MAP"])
        name = f"{Path(self.module).stem}-{os.getpid()}-{time.monotonic_ns()}.json"
        unfinished = folder / f"{name}.part"  # a rank may be killed while it writes
        unfinished.write_text(json.dumps(records))
        unfinished.rename(folder / name)

    def forget(self) -> None:
        """Start without records, with the same key."""
        self.reached = {self.key: set()}
        self.codes = self.reached[self.key]
        self.seconds.clear()
        self.uses = {}
        self.since = cpu_seconds()

    def fork(self) -> None:
        """Forget, in a forked process, what its parent has entered."""
        self.forked = True
        self.forget()

    def leave(self, status: int) -> None:
        """Write before a forked process ends without ``atexit``."""
        self.write()
        _exit(status)

    def trace(self) -> None:
        """Trace this process and those it forks."""
        threading.settrace(self.entered)
        sys.settrace(self.entered)


class Plugin:
    """Hooks that give the recorder its keys."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Attribute to ``item`` what is reached from here on."""
        recorder, module = self.recorder, str(item.path.relative_to(ROOT))
        if module != recorder.module:
            if recorder.module:
                recorder.write()
            recorder.module = module
        recorder.trace()  # a test before may have ended the tracing
        recorder.switch(item.nodeid)
        result = yield
        recorder.switch("")
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note the shared fixtures that ``item`` has used, those of `getfixturevalue` too."""
        used: dict[str, Any] = getattr(getattr(item, "_request", None), "_fixture_defs", {})
        self.recorder.uses[item.nodeid] = [
            _fixture_key(each, each.cached_result[1])
            for each in used.values()
            if each.scope != "function" and each.cached_result
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Attribute to the fixture what it reaches, if tests share it."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.recorder.switch(_fixture_key(fixturedef, fixturedef.cache_key(request)))  # type: ignore[arg-type]
        try:
            return (yield)
        finally:
            self.recorder.switch(before)


def _fixture_key(fixture: pytest.FixtureDef[Any], parameter: object) -> str:
    return f"{fixture.baseid}|{fixture.argname}|{parameter!r}"


def start() -> Recorder:
    """Trace this process and those it forks, and write at their end."""
    import atexit

    recorder = Recorder()
    Path(os.environ["MCA_TEST_MAP"]).mkdir(parents=True, exist_ok=True)
    recorder.trace()
    os.register_at_fork(after_in_child=recorder.fork)
    os._exit = recorder.leave  # type: ignore[assignment]
    atexit.register(recorder.write)
    return recorder


def pytest_configure(config: pytest.Config) -> None:
    """Record if ``MCA_TEST_MAP`` names a folder."""
    if "MCA_TEST_MAP" in os.environ:
        config.pluginmanager.register(Plugin(start()))
