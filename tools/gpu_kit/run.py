"""Runs the kit where a GPU is: each step in a process of its own, its result kept at once, whatever becomes of it.

    python -m tools.gpu_kit.run RESULTS --part N [--kit FOLDER]              # 1, then 2 and 3: each under ten minutes
    python -m tools.gpu_kit.run RESULTS --device cpu --tiny [--only STEP ...]     # a rehearsal

In RESULTS: ``results.jsonl``, one line a step; ``summary.md`` and ``summary.json``; ``logs.txt``; pictures. FOLDER is
what `gather` made. Exit code 1 if a step failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu_kit.steps import LEFT_OUT, STEPS, Step
from tools.gpu_kit.summary import write_summary

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 490
"""Limit of one part: three parts take less than 25 minutes, without starts of the machine and copies."""
_PATIENCE = 10
"""Factor of the time limits on a shared CPU."""
_LAST, _LAST_OF_OTHERS = 1500, 6000
"""Letters of a log that a result keeps, and of one that another process wrote into the step's folder."""
_SOURCES = (
    ".",
    *(f"packages/{name}/src" for name in ("mca-config", "mca-models", "mca-train", "mca-convert")),
    *("integration_tests/support", "packages/mca-models/tests", "packages/mca-train/tests"),
)


@dataclass(frozen=True)
class Workspace:
    """Device and folders of a run.

    Args:
        results: What is kept.
        scratch: What is not.
        paths: For PYTHONPATH.
        device: ``cuda`` or ``cpu``.
        tiny: Sizes for a rehearsal.
    """

    results: Path
    scratch: Path
    paths: tuple[str, ...]
    device: str
    tiny: bool

    def environment(self, step: Step) -> dict[str, str]:
        """The variables of a step's process."""
        path = os.pathsep.join([*self.paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        set_here = {
            "PYTHONPATH": path,
            "MCA_DEVICE": self.device,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if step.exact:
            set_here["NVIDIA_TF32_OVERRIDE"] = (
                "0"  # before CUDA starts: no library multiplies fp32 with fewer bits
            )
        return os.environ | set_here


def install(kit: Path | None, target: Path) -> tuple[str, ...]:
    """Folders for PYTHONPATH; the wheels of ``kit`` are installed into ``target``, its archives unpacked there."""
    paths = [str((ROOT / source).resolve()) for source in _SOURCES]
    if kit is None:
        return tuple(paths)
    if not (target / "complete").exists():
        wheels = sorted(str(path) for path in (kit / "wheels").glob("*.whl"))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        subprocess.run(
            [*command, "--no-cache-dir", "--upgrade", "--target", str(target), *wheels], check=True
        )
        for archive in kit.glob("*.tar.xz"):
            shutil.unpack_archive(archive, target, filter="data")
        (target / "complete").touch()
    return (*paths, str(target))


def run(step: Step, workspace: Workspace, seconds: float) -> dict[str, Any]:
    """Run a step and keeps its result, which is returned."""
    output, log = workspace.scratch / f"{step.name}.json", workspace.scratch / f"{step.name}.log"
    folder = workspace.scratch / step.name
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tools.gpu_kit.steps", step.name, str(folder), str(output)]
    command += [workspace.device, *["--tiny"] * workspace.tiny]
    start = time.monotonic()
    with log.open("w") as stream:
        started = subprocess.Popen(
            command,
            env=workspace.environment(step),
            stdout=stream,
            stderr=stream,
            cwd=ROOT,
            start_new_session=True,
        )
        code = _wait(started, seconds)
    found = json.loads(output.read_text()) if output.exists() else {"figures": {}, "checks": []}
    result = {
        "step": step.name,
        "status": {0: "passed", LEFT_OUT: "left out", 124: "out of time"}.get(code, "failed"),
        "seconds": round(time.monotonic() - start, 1),
        "device": workspace.device,
        "tiny": workspace.tiny,
        **found,
        "log": log.read_text(errors="replace")[-_LAST:] if code else "",
    }
    if code:
        _add_logs(folder, log)
    for picture in folder.glob("*.svg"):
        shutil.copy(picture, workspace.results)
    shutil.rmtree(folder, ignore_errors=True)
    keep(result, workspace.results, log)
    return result


def _add_logs(folder: Path, log: Path) -> None:
    """Return the output of the step, followed by that of its processes."""
    with log.open("a") as stream:
        for other in sorted(folder.glob("*.log")):
            print(
                f"--- {other.name}",
                other.read_text(errors="replace")[-_LAST_OF_OTHERS:],
                sep="\n",
                file=stream,
            )


def _wait(started: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code of a process; 124 if it and its children were ended."""
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        try:
            os.killpg(started.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        started.wait()


def keep(result: dict[str, Any], results: Path, log: Path | None = None) -> None:
    """Add a result to the folder, and its log."""
    with (results / "results.jsonl").open("a") as file:
        print(json.dumps(result), file=file)
    if log is not None:
        with (results / "logs.txt").open("a") as file:
            print(
                f"=== {result['step']}: {result['status']}",
                log.read_text(errors="replace"),
                sep="\n",
                file=file,
            )
    wrong = [check["name"] for check in result["checks"] if not check["holds"]]
    told = f"; wrong: {', '.join(wrong)}" if wrong else ""
    print(f"{result['step']}: {result['status']}, {result['seconds']} s{told}", flush=True)


def time_of(step: Step, later: Sequence[Step], left: float) -> float:
    """Seconds that a step may take where so many are left for it and for those after it."""
    return max(min(step.seconds, left - sum(other.least for other in later)), min(step.least, left), 1)


def chosen(part: int | None, only: list[str] | None) -> list[Step]:
    """Steps of a part, or those named."""
    return [step for step in STEPS if (part is None or step.part == part) and (not only or step.name in only)]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", type=int, choices=sorted({step.part for step in STEPS}))
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kit", type=Path, help="what gather made")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir()) / "gpu-kit-site")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    start, results = time.monotonic(), args.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        paths = install(args.kit and args.kit.absolute(), args.site)
        workspace = Workspace(results, Path(scratch), paths, args.device, args.tiny)
        steps = chosen(args.part, args.only)
        patience = _PATIENCE if args.device == "cpu" else 1
        for number, step in enumerate(steps, 1):
            left = args.seconds - (time.monotonic() - start)
            found.append(run(step, workspace, patience * time_of(step, steps[number:], left / patience)))
            write_summary(results)
    print((results / "summary.md").read_text())
    return int(any(result["status"] in ("failed", "out of time") for result in found))


if __name__ == "__main__":
    sys.exit(main())
