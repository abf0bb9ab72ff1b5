"""One page of HTML about a run, or about two side by side, with charts as inline SVG and without external files.

`RunFiles` has the files of a run's directory: logs, configuration, checkpoints.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.files import parse_record
from mca_config.types import JsonObject
from mca_train.plots import COLOURS as STEP_COLOURS

LOG, RECORD = "train_log.jsonl", "run.json"
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Logs and records of a run.

    Args:
        folder: The run's directory.
        curves: Steps and values by name of the logged value.
        record: ``run.json``; empty if the run wrote none.
        peak: Highest memory of a rank in GiB since ``run.json`` was written, also after a resume on another layout;
            None: not logged.
        checkpoints: Names and bytes.
        seconds: Time from the first log to the last.
    """

    folder: Path
    curves: dict[str, Points]
    record: JsonObject
    checkpoints: list[tuple[str, int]]
    seconds: float = field(default=0.0)
    peak: float | None = None

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.folder.resolve().name

    @property
    def last(self) -> dict[str, float]:
        """Last value of each curve."""
        return {name: points[-1][1] for name, points in self.curves.items()}

    def recorded(self, name: str) -> JsonObject:
        """Return an object of `record`; empty if it is absent or not an object."""
        value = self.record.get(name)
        return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> RunFiles:
    """Read the run in ``folder``.

    Raises:
        UsageError: The folder has no log.
    """
    path = folder / LOG
    if not path.is_file():
        raise UsageError(f"{folder} has no {LOG}; name the output_dir of a run")
    record = (
        parse_record((folder / RECORD).read_text(encoding="utf-8", errors="replace"))
        if (folder / RECORD).is_file()
        else {}
    )
    began = record.get("began")
    curves: dict[str, Points] = {}
    times, peaks = [], []
    number, before, last = 0, 0.0, 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        entry = parse_record(line)
        step = entry.pop("step", None)
        time = entry.pop("time", None)
        rounds = entry.pop("rounds_before", 0)
        if not isinstance(step, int | float):
            continue
        if rounds != number:
            number, before = rounds, before + last
        last = step
        if isinstance(time, int | float):
            times.append(float(time))
        since = not isinstance(began, int | float) or (isinstance(time, int | float) and time >= began)
        if since and isinstance(peak := entry.get("peak_memory_gib"), int | float):
            peaks.append(float(peak))
        for name, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(name, []).append((before + step, float(value)))
    seconds = max(times) - min(times) if times else 0.0
    return RunFiles(
        folder=folder,
        curves=curves,
        record=record,
        checkpoints=_list_checkpoints(folder),
        seconds=seconds,
        peak=max(peaks, default=None),
    )


def _list_checkpoints(folder: Path) -> list[tuple[str, int]]:
    found = []
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit():
            with suppress(FileNotFoundError):  # the run has deleted it meanwhile
                found.append((path.name, _size(path)))
    return sorted(found, key=lambda one: int(one[0].removeprefix("checkpoint-")))


def _size(folder: Path) -> int:
    """Return the bytes in ``folder``.

    Raises:
        FileNotFoundError: Something was deleted meanwhile.
    """

    def gone(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            raise error

    files = (Path(where) / name for where, _, names in os.walk(folder, onerror=gone) for name in names)
    return sum(file.stat().st_size for file in files)


COLOURS = ("#1f5fa8", "#d9720b")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 210, 58, 26, 10
GIB = 1024**3
_OUTSIDE_STEP = "evaluation, or a reference computed first"
_PARTS = STEP_COLOURS | {_OUTSIDE_STEP: "#9d755d"}
"""Colours of planned memory; the last part is the memory beyond that of a step in the plan's total."""
_FIRST = (
    "loss",
    "eval_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_time",
    "peak_memory_gib",
)
_LAST = (
    "epoch",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
)
_STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:1000px;color:#222;padding:0 1em}
h1{font-size:1.4em}h2{font-size:1.1em;border-bottom:1px solid #ddd;margin-top:2em}
figure{display:inline-block;margin:0 12px 12px 0}figcaption{font-weight:600}svg{max-width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#444}
table{border-collapse:collapse}td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}
td{border-top:1px solid #eee}code{white-space:pre-wrap}"""
SCHEMA, VERSION = "mca-train/report", 1
_RECORDED = ("began", "task", "world_size", "layout")
_OBJECTS = ("configuration", "versions", "plan")


def lines(name: str, curves: Sequence[tuple[str, Points]]) -> str:
    """Return a chart with one curve for each run, over steps, without non-finite values."""
    kept = [(label, [(x, y) for x, y in points if math.isfinite(y)]) for label, points in curves]
    points = [point for _, some in kept for point in some]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    high, last = (high if high > low else low + (abs(low) or 1.0)), (last if last > first else first + 1)

    def point(x: float, y: float) -> str:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 10)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    marks = [_mark(value, point(first, value)) for value in (low, (low + high) / 2, high)]
    for number, (label, some) in enumerate(kept):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(point(x, y) for x, y in some)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(some) < 40:
            marks += [
                f'<circle cx="{point(x, y).split(",")[0]}" cy="{point(x, y).split(",")[1]}" r="2.2" fill="{colour}">'
                f"<title>{escape(label)}, step {x:g}: {y:g}</title></circle>"
                for x, y in some
            ]
    bottom = _HEIGHT - 8
    marks.append(f'<text x="{_LEFT}" y="{bottom}">step {first:g}</text>')
    marks.append(f'<text x="{_WIDTH - 10}" y="{bottom}" text-anchor="end">{last:g}</text>')
    return f"<figure><figcaption>{escape(name)}</figcaption>{_svg(_WIDTH, _HEIGHT, marks)}</figure>"


def _mark(value: float, at: str) -> str:
    down = at.split(",")[1]
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{down}" y2="{down}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 5}" y="{float(down) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    )


def bars(title: str, parts: dict[str, str], rows: Sequence[tuple[str, dict[str, float]]], unit: str) -> str:
    """Return a chart with a stacked bar for each row.

    Args:
        title: Title of the chart.
        parts: Names and colours of the stacked parts.
        rows: Names, and sizes by part.
        unit: Unit of the sizes.
    """
    most = max((sum(sizes.values()) for _, sizes in rows), default=0.0) or 1.0
    marks = []
    for number, (name, sizes) in enumerate(rows):
        across, down = 100.0, 10 + 24 * number
        marks.append(f'<text x="94" y="{down + 13}" text-anchor="end">{escape(name)}</text>')
        for part, colour in parts.items():
            width = sizes.get(part, 0.0) / most * 640
            marks.append(
                f'<rect x="{across:.1f}" y="{down}" width="{width:.1f}" height="18" fill="{colour}">'
                f"<title>{escape(part)}: {sizes.get(part, 0.0):.3g} {unit}</title></rect>"
            )
            across += width
        marks.append(f'<text x="{across + 6:.1f}" y="{down + 13}">{sum(sizes.values()):.3g} {unit}</text>')
    key = "".join(
        f'<span style="color:{colour}">&#9632;</span> {escape(part)} ' for part, colour in parts.items()
    )
    drawn = _svg(840, 20 + 24 * len(rows), marks)
    return f"<figure><figcaption>{escape(title)} &nbsp; {key}</figcaption>{drawn}</figure>"


def _svg(width: int, height: int, marks: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"{''.join(marks)}</svg>"
    )


def page(runs: Sequence[RunFiles]) -> str:
    """Return the HTML document."""
    title = " and ".join(run.name for run in runs)
    key = "".join(
        f'<span style="color:{COLOURS[number]}">&#9632;</span> {escape(run.name)} &nbsp;'
        for number, run in enumerate(runs)
    )
    parts = [_overview(runs), _curves(runs), _memory(runs), _checkpoints(runs), _configuration(runs)]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{key}</p>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _overview(runs: Sequence[RunFiles]) -> str:
    rows = [
        ["steps", *(f"{max((p[-1][0] for p in run.curves.values()), default=0):g}" for run in runs)],
        ["minutes from first to last log", *(f"{run.seconds / 60:.1f}" for run in runs)],
        ["ranks", *(str(run.record.get("world_size", "unknown")) for run in runs)],
        ["layout", *(str(run.record.get("layout", "unknown")) for run in runs)],
        ["kind", *(str(run.record.get("task", "unknown")) for run in runs)],
    ]
    for name in ("loss", "eval_loss", "tokens_per_second", "mfu", "pipeline_bubble", "peak_memory_gib"):
        if any(name in run.last for run in runs):
            rows.append(
                [f"{name} (last)", *(f"{run.last[name]:.6g}" if name in run.last else "" for run in runs)]
            )
    return "<h2>Overview</h2>" + _table(["", *(run.name for run in runs)], rows)


def _curves(runs: Sequence[RunFiles]) -> str:
    names = [name for name in _FIRST if any(name in run.curves for run in runs)]
    others = {name for run in runs for name in run.curves} - {*_FIRST, *_LAST}
    names += sorted(name for name in others if not name.endswith(("_runtime", "_per_second")))
    charts = (
        lines(name, [(run.name, run.curves[name]) for run in runs if name in run.curves]) for name in names
    )
    return "<h2>Curves</h2>" + "".join(charts)


def _memory(runs: Sequence[RunFiles]) -> str:
    found = []
    for run in runs:
        stages = run.recorded("plan").get("stages")
        if not stages:
            continue
        rows = [(f"stage {number}", _planned(stage)) for number, stage in enumerate(stages)]
        parts = {part: colour for part, colour in _PARTS.items() if any(sizes[part] for _, sizes in rows)}
        found.append(bars(f"planned memory, {run.name}", parts, rows, "GiB"))
        if run.peak is not None:
            planned = max(sum(sizes.values()) for _, sizes in rows)
            found.append(
                f"<p>{escape(run.name)}: planned {planned:.3g} GiB on the fullest rank, measured {run.peak:.3g} GiB "
                "on the fullest of all (of a GPU what was allocated there; "
                "without one the whole process, libraries too)</p>"
            )
    return "<h2>Memory</h2>" + "".join(found) if found else ""


def _planned(stage: JsonObject) -> dict[str, float]:
    """Return GiB by part, which add up to the stage's total."""
    sizes = {part: stage.get(part, 0) / GIB for part in STEP_COLOURS}
    rest = stage.get("total", 0) / GIB - sum(sizes.values())
    return sizes | {_OUTSIDE_STEP: max(rest, 0.0)}


def _checkpoints(runs: Sequence[RunFiles]) -> str:
    rows = [[run.name, name, f"{size / GIB:.3f}"] for run in runs for name, size in run.checkpoints]
    return "<h2>Checkpoints</h2>" + _table(["run", "checkpoint", "GiB"], rows) if rows else ""


def _configuration(runs: Sequence[RunFiles]) -> str:
    found = []
    for section in ("configuration", "versions"):
        values = [run.recorded(section) for run in runs]
        keys = sorted({key for some in values for key in some})
        rows = [[key, *(json.dumps(some[key]) if key in some else "" for some in values)] for key in keys]
        if rows:
            found.append(f"<h2>{section.capitalize()}</h2>" + _table(["", *(run.name for run in runs)], rows))
    return "".join(found)


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
    """Return the report as a JSON object: ``mca-train/report``, version 1; docs/reference/json.md lists its keys."""
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
