"""Files of a run's directory: logs, configuration, checkpoints."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.files import parse_record
from mca_config.types import JsonObject

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
        checkpoints=_checkpoints(folder),
        seconds=seconds,
        peak=max(peaks, default=None),
    )


def _checkpoints(folder: Path) -> list[tuple[str, int]]:
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
