"""``mca-train report`` writes a page about a run, or prints the same as one JSON object."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.types import JsonObject
from mca_train.report.page import GIB, page
from mca_train.report.run_files import RunFiles, read_run

SCHEMA, VERSION = "mca-train/report", 1
_RECORDED = ("began", "task", "world_size", "layout")
_OBJECTS = ("configuration", "versions", "plan")


def write_report(
    folder: Path, *, compare: str | None = None, output: str | None = None, json: bool = False
) -> int:
    """Write the page about a run and print its path.

    Args:
        folder: The run's ``output_dir``.
        compare: The ``output_dir`` of another run to compare with.
        output: File of the page; None: ``report.html`` in ``folder``.
        json: Whether to print the JSON object instead.

    Raises:
        UsageError: There is no run, or the page cannot be written.
    """
    if json and output is not None:
        raise UsageError(
            "--json prints the report and writes no page; leave out --output, or redirect what is printed"
        )
    runs = [read_run(folder), *([read_run(Path(compare))] if compare else [])]
    if json:
        sys.stdout.write(_text(document(runs)))
        return 0
    path = Path(output) if output else folder / "report.html"
    try:
        path.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--output {path}: cannot be written ({error.strerror}); name another file"
        ) from None
    sys.stdout.write(f"{path}\n")
    return 0


def document(runs: Sequence[RunFiles]) -> JsonObject:
    """Return the report as a JSON object: ``mca-train/report``, version 1; docs/launch.md lists its keys."""
    return {"schema": SCHEMA, "version": VERSION, "runs": [_run_document(run) for run in runs]}


def _run_document(run: RunFiles) -> JsonObject:
    return {
        "name": run.name,
        **{name: run.record.get(name) for name in _RECORDED},
        **{name: run.recorded(name) or None for name in _OBJECTS},
        "seconds": run.seconds,
        "measured_bytes": None if run.peak is None else round(run.peak * GIB),
        "curves": {
            name: [[step, value if math.isfinite(value) else None] for step, value in points]
            for name, points in run.curves.items()
        },
        "checkpoints": [{"name": name, "bytes": size} for name, size in run.checkpoints],
    }


def _text(found: JsonObject) -> str:
    return json.dumps(found, indent=2, allow_nan=False) + "\n"
