"""``mca-train`` or ``mca-convert`` in a fork of this process, which has imported what its ranks need.

Seconds are saved on every rank. Tests of the process itself (signals, launchers, exit) start a real one.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import run_ranks


def launched(
    command: list[str],
    stdout: str | None = None,
    before: Callable[[], None] = lambda: None,
    *,
    plots: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Runs ``python -m mca_train WORDS`` (or ``mca_convert``), given as these words; its output and exit code.

    Args:
        command: The words.
        stdout: A file to print to, "|" (a pipe that nobody reads) or "-" (closed); what was printed is not known.
        before: Done in the fork before it starts.
        plots: Draw the losses at the end of a run: a quarter of its CPU seconds, for a file that few tests look at.
    """
    import mca_train.run.train
    import mca_train.trainer.trainer

    assert mca_train.run.train and mca_train.trainer.trainer  # so that a run need not import them
    python, _, program, *words = command
    assert python == sys.executable
    importlib.import_module(f"{program}.cli")
    with tempfile.TemporaryDirectory() as name:
        (code,) = run_ranks(
            1, _main, program, words, Path(name), stdout, before, plots, process_group=False, timeout=240
        )
        printed = ["" if stdout else (Path(name) / "stdout").read_text(), (Path(name) / "stderr").read_text()]
    return subprocess.CompletedProcess(command, code, *printed)


def command(folder: Path, kind: str, name: str, values: dict[str, Any]) -> list[str]:
    """``mca-train KIND`` of a configuration with ``values``, written to ``folder``; ``name`` is also the output's.

    Args:
        folder: Has the model in ``model``.
        kind: Of the run.
        name: Of the file and of the output directory.
        values: Of the keys; what most tests leave alone is set.
    """
    settings = {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / name),
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": "5e-3",
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
    }
    path = folder / f"{name}.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in (settings | values).items()))
    return [sys.executable, "-m", "mca_train", kind, str(path)]


def _main(
    program: str, words: list[str], folder: Path, stdout: str | None, before: Callable[[], None], plots: bool
) -> int:
    import mca_train.run.train

    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for number, stream in ((1, stdout or "stdout"), (2, "stderr")):
        _redirect(number, folder, stream)
    logging.root.handlers.clear()  # pytest's
    # where it is closed, a process starts with None
    sys.stdout = None if stdout == "-" else os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if not plots:
        mca_train.run.train.plot_losses = lambda history, folder: None
    before()
    try:
        code: int = importlib.import_module(f"{program}.cli").main(words)
        return code
    finally:
        sys.stdout = sys.stdout or sys.stderr  # for what comes after
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect(number: int, folder: Path, stream: str) -> None:
    """Has the descriptor ``number`` go to ``stream``, a file of ``folder`` or a whole path, "|" or "-"."""
    if stream == "-":
        os.close(number)
        return
    if stream == "|":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, number)
        return
    with (folder / stream).open("wb") as file:
        os.dup2(file.fileno(), number)
