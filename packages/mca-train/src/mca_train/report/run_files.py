"""What a run has left in its directory: logs, how it was configured, checkpoints."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.types import JsonObject

LOG, RECORD = "train_log.jsonl", "run.json"
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run, as far as it has come.

    Args:
        folder: The run's directory.
        curves: By name of what was logged, step and value; rounds one after the other.
        record: ``run.json``; empty if the run wrote none.
        peak: The most GiB that a rank has held since ``run.json`` was written, by a run that continues on another
            layout too; None: nothing says.
        checkpoints: Names and bytes.
        seconds: From the first log to the last.
    """

    folder: Path
    curves: dict[str, Points]
    record: JsonObject
    checkpoints: list[tuple[str, int]]
    seconds: float = field(default=0.0)
    peak: float | None = None

    @property
    def name(self) -> str:
        """What to call it."""
        return self.folder.resolve().name

    @property
    def last(self) -> dict[str, float]:
        """The last value of everything that was logged."""
        return {name: points[-1][1] for name, points in self.curves.items()}

    def recorded(self, name: str) -> JsonObject:
        """An object of `record`; empty if it is none."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> RunFiles:
    """The run in ``folder``.

    Raises:
        UsageError: There is none.
    """
    path = folder / LOG
    if not path.is_file():
        raise UsageError(f"{folder} holds no {LOG}; name the output_dir of a run")
    record = (
        _object((folder / RECORD).read_text(encoding="utf-8", errors="replace"))
        if (folder / RECORD).is_file()
        else {}
    )
    began = record.get("began")
    curves: dict[str, Points] = {}
    times, peaks = [], []
    number, before, last = 0, 0.0, 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        entry = _object(line)
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
        checkpoints=_checkpoints(folder),
        seconds=seconds,
        peak=max(peaks, default=None),
    )


def _object(text: str) -> JsonObject:
    """A line that is not whole is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _checkpoints(folder: Path) -> list[tuple[str, int]]:
    found = []
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit():
            with suppress(FileNotFoundError):  # the run has deleted it meanwhile
                found.append((path.name, _size(path)))
    return sorted(found, key=lambda one: int(one[0].removeprefix("checkpoint-")))


def _size(folder: Path) -> int:
    """Bytes in ``folder``.

    Raises:
        FileNotFoundError: Something was deleted meanwhile.
    """

    def gone(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            raise error

    files = (Path(where) / name for where, _, names in os.walk(folder, onerror=gone) for name in names)
    return sum(file.stat().st_size for file in files)
