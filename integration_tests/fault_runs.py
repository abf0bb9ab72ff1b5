"""Runs ``mca-convert`` again and again, with one call to the C library failing in each run.

    LD_PRELOAD=faults.so MCA_FAULT_ROOTS=FOLDER python fault_runs.py < runs.json

A run is ``{"arguments": [...], "folder": ..., "make": false, "number": n, "error": errno}``; each is a fork of this
process, which has done the first one before, so that everything is imported. Prints a line of JSON for each: its exit
code, what it said, how many calls it made and which one failed, and what stands in ``folder``, which is removed then.
``"make": true`` makes ``folder/out`` before.
"""

import ctypes
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def run(library: Any, case: dict[str, Any], said: Path) -> tuple[int, int, str]:
    """Exit code of a forked run, its calls, and the one that failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stderr.flush()
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        library.faults_arm(case["number"], case["error"])
        code = 99
        try:
            code = main(case["arguments"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            library.faults_disarm()
            told = {"calls": library.faults_count(), "call": library.faults_call().decode()}
            os.write(writer, json.dumps(told).encode())
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = json.loads(pipe.read() or '{"calls": 0, "call": "it died"}')
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), told["calls"], told["call"]


def go_through(cases: list[dict[str, Any]]) -> None:
    """Runs all of ``cases``."""
    library = ctypes.CDLL(None)
    library.faults_call.restype = ctypes.c_char_p
    library.faults_count.restype = ctypes.c_long
    library.faults_arm.argtypes = (ctypes.c_long, ctypes.c_int)
    with tempfile.TemporaryDirectory() as scratch:
        folder = fresh(cases[0])
        main(cases[0]["arguments"])
        shutil.rmtree(folder)
        for case in cases:
            folder = fresh(case)
            code, calls, call = run(library, case, Path(scratch, "said"))
            found = {"code": code, "said": Path(scratch, "said").read_text(), "calls": calls, "call": call}
            sys.stdout.write(json.dumps(found | {"tree": tree(folder)}) + "\n")
            sys.stdout.flush()
            shutil.rmtree(folder)


if __name__ == "__main__":
    go_through(json.load(sys.stdin))
