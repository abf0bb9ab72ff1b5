"""Gathers what a machine with one GPU and no network needs to run the kit, into one folder of limited size.

    python -m tools.gpu_kit.gather FOLDER [--engine FOLDER_OF_BUILD_TRANSFORMER_ENGINE]

The machine brings Python 3.12, torch 2.11 and transformers 5.17; the repository travels by itself. The folder gets
wheels of megatron-core and of what else is missing there, and our own, whose versions are read; of Transformer Engine,
which is built for that Python and torch unless ``--engine`` names what was, what it imports, with the device code of
the named GPUs alone. The build takes minutes, once: `tools/build_transformer_engine.py` keeps it in the user's cache.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from tools.gpu_kit.device_code import keep_only

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 64 * 2**20
"""Bytes that travel at once, the repository among them."""
PACKAGES = ("mca-config", "mca-models", "mca-train", "mca-convert")
MISSING = (
    *("megatron-core", "datasets", "dill", "multiprocess"),
    *("importlib-metadata", "ml-dtypes", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *(
        "pytest",
        "iniconfig",
        "pluggy",
        "pytest-timeout",
        "pytest-xdist",
        "execnet",
        "hypothesis",
        "sortedcontainers",
    ),
)
"""Packages that such a machine may lack: for mca, for Transformer Engine, for the tests."""
PYTHON, TORCH = "3.12", "2.11.0"
"""Versions of the machine, for which Transformer Engine's extension is built."""
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
ENGINE = ("transformer_engine*", "nvdlfw_inspect*")
"""Files copied from Transformer Engine's folder."""
ARCHITECTURES = (90,)
"""Hopper's: H100 and H200."""


def run(*command: str | Path, **environment: str) -> str:
    """Return a command's stdout; end the program with its exit code if it fails."""
    print("+", *command, file=sys.stderr)
    words = [str(part) for part in command]
    ran = subprocess.run(words, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(ran.returncode)
    return ran.stdout


def locked(names: Iterable[str]) -> list[str]:
    """Distributions in the newest versions that are locked, which are those of Python 3.12."""
    found: dict[str, list[Version]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        found.setdefault(package["name"], []).append(Version(package.get("version", "0")))
    return [f"{name}=={max(found[name])}" for name in names]


def fetch(wheels: Path) -> None:
    """Our wheels, and those of others for Python 3.12."""
    for package in PACKAGES:
        run("uv", "build", "--quiet", "--wheel", "--package", package, "--out-dir", wheels)
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    run("uvx", "pip", "download", "--quiet", "--no-deps", *target, "--dest", wheels, *locked(MISSING))
    for left in wheels.glob(".gitignore"):
        left.unlink()


def build_engine(kind: str) -> Path:
    """The folder of Transformer Engine for the machine's torch and a Python like its, built here if it never was."""
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        python = Path(folder) / "there" / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", kind, python.parent.parent)
        run("uv", "pip", "install", "--quiet", "--python", python, f"torch=={TORCH}", "packaging")
        built = run(python, ROOT / "tools" / "build_transformer_engine.py", MCA_TE_OPTIMISE="2")
    return Path(built.strip())


def pack_engine(source: Path, scratch: Path, target: Path) -> None:
    """Write Transformer Engine as one archive, its library without the device code of other GPUs."""
    for pattern in ENGINE:
        for found in source.glob(pattern):
            if found.is_dir():
                shutil.copytree(
                    found, scratch / found.name, ignore=shutil.ignore_patterns("__pycache__", "*.h")
                )
            else:
                shutil.copy(found, scratch / found.name)
    for library in scratch.rglob("libtransformer_engine*.so"):
        zeroed = keep_only(library, ARCHITECTURES)
        print(f"{library.name}: {zeroed >> 20} MiB of device code are left out", file=sys.stderr)
    with tarfile.open(target, "w:xz") as archive:
        for each in sorted(scratch.iterdir()):
            archive.add(each, each.name)


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """The command: 0, or 1 if the folder is there already or too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", type=Path, help="Transformer Engine, built elsewhere")
    parser.add_argument(
        "--python", default=PYTHON, help=f"a Python {PYTHON} to build it with, where uv finds none"
    )
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    if folder.exists():
        print(f"gather: {folder} is there already; remove it, or name another", file=sys.stderr)
        return 1
    (folder / "wheels").mkdir(parents=True)
    fetch(folder / "wheels")
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        pack_engine(args.engine or build_engine(args.python), Path(scratch), folder / "engine.tar.xz")
    size = size_of(folder)
    print(f"{folder}: {size / 2**20:.1f} MiB of {LIMIT >> 20}, which the repository shares")
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
