"""Builds Transformer Engine for this environment's torch, on a machine that needs no GPU and no CUDA toolkit.

    folder=$(uv run tools/build_transformer_engine.py)            # minutes the first time, then at once
    PYTHONPATH=$folder uv run pytest integration_tests/*/test_te_*.py

The folder holds what the extra ``te`` of ``mca-models`` adds to the environment, in the locked versions. It lies in
the user's cache by the versions it was built for, or where ``MCA_TRANSFORMER_ENGINE`` says; ``MAX_JOBS`` is the number
of compilers at once. Progress goes to stderr, the folder to stdout. Nothing is optimised, unless ``MCA_TE_OPTIMISE``
says a level such as 2 (`tools/gpu_kit`); to train, install the package as its own documentation says.
"""

import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = "transformer-engine-torch"
HEADERS = ("nvidia-cuda-crt", "nvidia-cuda-cccl")
"""Packages needed to compile only. In the folder it would be a second ``nvidia``, which hides that of torch."""
COMPILER = r"""#!/usr/bin/env bash
# c++ without optimisation unless it is asked for, with one precompiled header for all sources
set -eu
arguments=() shared=() skip= source=
for each in "$@"; do
    [[ $each == -O? ]] && each=-O${MCA_TE_OPTIMISE:-0}
    arguments+=("$each")
    if [[ -n $skip ]]; then skip=; continue; fi
    case $each in
        -o | -MF) skip=1 ;;
        -c | -MMD) ;;
        *.cpp) source=$each ;;
        *) shared+=("$each") ;;
    esac
done
[[ -n $source ]] || exec c++ "$@"
header=${0%/*}/all.h
(
    flock 9
    if [[ ! -f $header.gch ]]; then
        printf '#include "extensions.h"\n#include <pybind11/functional.h>\n#include <pybind11/pybind11.h>\n' >"$header"
        c++ -w "${shared[@]}" -x c++-header "$header" -o "$header.gch" || rm -f "$header.gch"
    fi
) 9>"$header.lock"
c++ -w -include "$header" "${arguments[@]}"
echo "${source##*/}" >>"${0%/*}/compiled"
"""

SITE = """# Transformer Engine looks for this library where the toolkit lies, or in the environment itself
import os
import pathlib

os.environ.setdefault("CURAND_HOME", str(pathlib.Path(__file__).parent / "libraries"))
"""


class CannotBuild(Exception):
    """Something that the build needs is missing, or a step of it failed."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def locked() -> dict[str, str]:
    """Requirements of the extra ``te``, by name: requirements with version and hashes, as the lock has them."""
    command = ["uv", "export", "--quiet", "--frozen", "--package", "mca-models", "--extra", "te"]
    command += ["--no-emit-workspace", "--no-header", "--no-annotate", "--python", sys.executable]
    entries = re.split(r"\n(?=\S)", run(command).strip())
    found: dict[str, str] = {}
    for entry in entries:
        if holds(entry):
            found[re.split(r"[=\[; ]", entry, maxsplit=1)[0]] = entry
    return found


def holds(requirement: str) -> bool:
    """Return whether the marker of a requirement is true in this Python."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement.split("\\", 1)[0].strip()).marker
    return marker is None or marker.evaluate()


def is_missing(name: str) -> bool:
    """Return whether the environment lacks a distribution."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def run(command: list[str], **environment: str) -> str:
    """Return the output of a command; its errors are shown at once, and it ends with this process."""
    try:
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            process_group=0,
        )
    except FileNotFoundError as error:
        raise CannotBuild(f"{command[0]} is not there: install it") from error
    try:
        printed = started.communicate()[0]
    except BaseException:
        os.killpg(started.pid, signal.SIGTERM)
        raise
    if started.returncode:
        raise CannotBuild(f"this failed with exit code {started.returncode}: {' '.join(command)}")
    return printed


@contextmanager
def counting(compiled: Path) -> Iterator[None]:
    """Says now and then how many sources the compiler has done."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(20):
            count = len(compiled.read_text().splitlines()) if compiled.exists() else 0
            say(f"compiled {count} sources")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def install(target: Path, requirements: list[str], *options: str, **environment: str) -> None:
    """Puts distributions, without what they need, into a folder."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        run([*command, "--target", str(target), *options, "-r", file.name], **environment)


def build(folder: Path, requirements: dict[str, str], cuda: str) -> None:
    """Fills ``folder``."""
    missing = [
        text for name, text in requirements.items() if name not in (EXTENSION, *HEADERS) and is_missing(name)
    ]
    say(f"fetching {len(missing)} distributions that are no part of the environment")
    install(folder, missing)
    install(folder / "libraries", ["nvidia-curand"])  # Transformer Engine loads it, torch does not bring it
    (folder / "sitecustomize.py").write_text(SITE)
    with tempfile.TemporaryDirectory(prefix="mca-te-") as made:
        scratch = Path(made)
        say("fetching build tools and the headers that torch does not bring")
        install(scratch / "tools", ["ninja", "wheel"])
        install(scratch / "headers", [f"{name}=={cuda}.*" for name in HEADERS])
        compiler = scratch / "mca-c++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        say(f"compiling {EXTENSION}: about seven minutes of one core")
        with counting(scratch / "compiled"):
            install(
                folder,
                [requirements[EXTENSION]],
                "--no-build-isolation",
                "--no-cache",  # uv would keep the result under a name without torch's version
                CC=str(compiler),
                CXX=str(compiler),
                CPATH=str(next(scratch.glob("headers/nvidia/*/include"))),
                MAX_JOBS=os.environ.get("MAX_JOBS", "2"),
                NVTE_BUILD_USE_NVIDIA_WHEELS="1",
                NVTE_PYTORCH_FORCE_BUILD="TRUE",
                NVTE_WITH_NCCL_EP="0",
                PATH=f"{scratch / 'tools' / 'bin'}{os.pathsep}{os.environ['PATH']}",
                PYTHONPATH=f"{scratch / 'tools'}{os.pathsep}{folder}",
            )


def check(folder: Path) -> None:
    """Imports what was built, in a process of its own."""
    code = "import torch, transformer_engine.pytorch as te; print(te.Linear)"
    run([sys.executable, "-c", code], PYTHONPATH=str(folder))


def place(version: str, torch: str) -> Path:
    """Return the folder of the library for these versions."""
    if chosen := os.environ.get("MCA_TRANSFORMER_ENGINE"):
        return Path(chosen).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    level = os.environ.get("MCA_TE_OPTIMISE")
    built = f"-O{level}" if level else ""
    return cache / "mca" / f"transformer-engine-{version}-torch-{torch}-{python}{built}"


def make() -> Path:
    """The folder, built if it is not there."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        raise CannotBuild(f"torch {torch.__version__} is built without CUDA: its headers are missing")
    requirements = locked()
    version = requirements["transformer-engine"].split("==")[1].split()[0]
    folder = place(version, torch.__version__)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when a build is killed
        if (folder / "complete").exists():
            say(f"Transformer Engine {version} for torch {torch.__version__} is built")
            return folder
        partial = folder.with_name(f"{folder.name}.partial")
        for left in (partial, folder):
            shutil.rmtree(left, ignore_errors=True)
        try:
            build(partial, requirements, cuda)
            check(partial)
            (partial / "complete").touch()
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    say(f"built {folder}")
    return folder


def main() -> int:
    """The command: 0 and the folder on stdout, or 1 and why not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(make())
    except CannotBuild as error:
        print(f"build_transformer_engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
