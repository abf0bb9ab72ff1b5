"""Changes that the root's ``conftest.py`` makes to pytest and to the workers of pytest-xdist."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs

from source_tree import ROOT


@pytest.fixture
def silent() -> Iterator[logging.Logger]:
    """A logger that does not propagate."""
    logger = logging.getLogger("mca.tests.silent")
    logger.propagate = False
    yield logger
    logger.propagate = True


def test_logs_of_the_root_logger_alone_are_captured(silent: logging.Logger) -> None:
    with catching_logs(logging.NullHandler()) as handler:
        assert handler in logging.getLogger().handlers
        assert handler not in silent.handlers
    assert logging.getLogger(silent.name) is silent


def test_pytest_by_itself_still_looks_at_every_logger(silent: logging.Logger) -> None:
    capturing = catching_logs(logging.NullHandler())
    patched: Any = catching_logs.__enter__
    enter: Callable[[object], object] = patched.__wrapped__
    enter(capturing)
    found = list(silent.handlers)
    capturing.__exit__(None, None, None)
    assert capturing.handler in found, "pytest no longer does: delete capture_root_logger_only of conftest.py"


TESTS = """
import atexit, sys

def test_passes():
    atexit.register(lambda: sys.stderr.write("last words"))

def test_depends():
    assert {passes}
"""


@pytest.mark.qualify
@pytest.mark.parametrize(("passes", "status"), [(True, 0), (False, 1)])
def test_workers_that_end_at_once_lose_no_output_and_change_no_status(
    tmp_path: Path, passes: bool, status: int
) -> None:
    path = tmp_path / "test_words.py"
    path.write_text(TESTS.format(passes=passes))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1", "-q", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == status, done.stdout
    assert "last words" in done.stderr
