"""Runs ``mca-convert`` again and again, with one call to the C library failing in each run.

    LD_PRELOAD=faults.so MCA_FAULT_ROOTS=FOLDER python fault_runs.py

A run is ``{"arguments": [...], "folder": ..., "make": false, "fault": {"site": ..., "nth": n, "error": errno}}``, or
``"fault": null``. A line of standard input is a list of them; each is a fork of this process, which has done the first
one before, so that everything is imported. Prints a line of JSON for each: its exit code, what it said, the sites that
it called (see `fault_sites`) or the one that failed, and the files in ``folder``, which is removed then.
``"make": true`` makes ``folder/out`` before.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fault_sites import Fault, heard, watched
from mca_convert.cli import main


def tree(folder: Path) -> dict[str, int]:
    """The CRC-32 of every file, -1 of every directory, by name."""
    import zlib

    return {
        str(path.relative_to(folder)): -1 if path.is_dir() else zlib.crc32(path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def fresh(case: dict[str, Any]) -> Path:
    """The folder of a run, as it is before."""
    folder = Path(case["folder"])
    folder.mkdir()
    if case["make"]:
        (folder / "out").mkdir()
    return folder


def run(case: dict[str, Any], said: Path, reported: Path) -> int:
    """Exit code of a forked run, whose lines go to ``said`` and its calls to ``reported``."""
    pid = os.fork()
    if pid == 0:
        sys.stderr.flush()
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code = 99
        try:
            with watched(reported, case["fault"] and Fault(**case["fault"])):
                code = main(case["arguments"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def go_through(cases: list[dict[str, Any]]) -> None:
    """Runs all of ``cases``."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = fresh(cases[0])
        main(cases[0]["arguments"])
        shutil.rmtree(folder)
        for number, case in enumerate(cases):
            folder, reported = fresh(case), Path(scratch, f"reported.{number}")
            code = run(case, Path(scratch, "said"), reported)
            found = {"code": code, "said": Path(scratch, "said").read_text(), "sites": heard(reported)}
            sys.stdout.write(json.dumps(found | {"tree": tree(folder)}) + "\n")
            sys.stdout.flush()
            shutil.rmtree(folder)


if __name__ == "__main__":
    for line in sys.stdin:
        go_through(json.loads(line))
