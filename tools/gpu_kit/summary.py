"""The results of all parts as one table, as JSON and as markdown for docs/validation/performance.md.

python -m tools.gpu_kit.summary FOLDER [RESULTS.jsonl ...]       # summary.json and summary.md of them into FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def read(files: list[Path]) -> list[Result]:
    """The last result of each step, in the order in which steps first came."""
    found: dict[str, Result] = {}
    for file in files:
        for line in file.read_text().splitlines():
            result = json.loads(line)
            found[result["step"]] = result
    return list(found.values())


def markdown(results: list[Result]) -> str:
    """A table of steps, one of figures, and what went wrong."""
    where = next(
        (str(r["figures"]["device"]) for r in results if "device" in r["figures"]), "an unknown device"
    )
    told = " (a rehearsal with tiny sizes: no figure of a GPU)" if any(r["tiny"] for r in results) else ""
    lines = [f"Measured on {where}{told}.", "", "| step | outcome | s | checks |", "|---|---|---|---|"]
    for result in results:
        checks = result["checks"]
        held = sum(check["holds"] for check in checks)
        lines.append(
            f"| {result['step']} | {result['status']} | {result['seconds']} | {held} of {len(checks)} |"
        )
    lines += ["", "| step | figure | value |", "|---|---|---|"]
    for result in results:
        lines += [f"| {result['step']} | {name} | {value} |" for name, value in result["figures"].items()]
    return "\n".join([*lines, *_wrong(results), ""])


def _wrong(results: list[Result]) -> list[str]:
    """Check that do not hold, and the ends of logs."""
    lines: list[str] = []
    for result in results:
        wrong = [check for check in result["checks"] if not check["holds"]]
        lines += [
            f"- {result['step']}: {c['name']} is {c['value']:.4g}, at most {c['limit']:.4g}" for c in wrong
        ]
        if result["status"] != "passed" and result["log"].strip():
            last = result["log"].strip().splitlines()[-1]
            lines.append(f"- {result['step']}: {result['status']}: {last[:300]}")
    return ["", *lines] if lines else []


def write_summary(folder: Path, files: list[Path] | None = None) -> None:
    """Write ``summary.json`` and ``summary.md`` of the folder's results, or of ``files``."""
    results = read(files or [folder / "results.jsonl"])
    (folder / "summary.json").write_text(json.dumps(results, indent=1))
    (folder / "summary.md").write_text(markdown(results))


if __name__ == "__main__":
    write_summary(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
