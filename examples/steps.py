"""Functions that the examples of whole jobs share: the output directory, titles, mca's commands."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def start_clean(out: Path, example: str) -> None:
    """Remove the previous output of ``example`` and create an empty ``out``."""
    marker = out / f".{example}"
    if out.exists() and not marker.exists() and any(out.iterdir()):
        sys.exit(f"error: --output_dir {out} exists and was not made by this script; choose another")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    marker.touch()


def step(number: int, of: int, title: str) -> None:
    """Print the title of a step."""
    print(f"\n[{number}/{of}] {title}", flush=True)


def run(command: str, *arguments: str | Path) -> None:
    """Run one of mca's commands as a user would, its output shown."""
    print("$", command, *arguments, flush=True)
    executable = Path(sysconfig.get_path("scripts")) / command
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([executable, *map(str, arguments)], check=False, env=environment)
    if done.returncode:
        sys.exit(f"error: {command} ended with exit code {done.returncode}")
