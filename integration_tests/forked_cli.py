"""``mca-train`` in a fork of this process, which has imported all of it: the ranks that it forks need not.

Seconds are saved on every rank. Tests of the process itself (signals, launchers, exit) start a real one.
"""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import run_ranks


def launched(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs ``python -m mca_train WORDS``, given as these words; what it printed and its exit code."""
    import mca_train.trainer
    import mca_train.workflow

    assert mca_train.trainer
    assert mca_train.workflow
    assert command[:3] == [sys.executable, "-m", "mca_train"]
    with tempfile.TemporaryDirectory() as name:
        (code,) = run_ranks(1, _main, command[3:], Path(name), process_group=False, timeout=240)
        printed = [(Path(name) / stream).read_text() for stream in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, code, *printed)


def _main(words: list[str], folder: Path) -> int:
    from mca_train.cli import main

    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for number, stream in ((1, "stdout"), (2, "stderr")):
        with (folder / stream).open("wb") as file:
            os.dup2(file.fileno(), number)
    logging.root.handlers.clear()  # pytest's
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        return main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
