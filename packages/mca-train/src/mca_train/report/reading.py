"""What a run has left in its directory: logs, how it was configured, checkpoints."""

import json
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
        checkpoints: Names and bytes.
        seconds: From the first log to the last.
    """

    folder: Path
    curves: dict[str, Points]
    record: JsonObject
    checkpoints: list[tuple[str, int]]
    seconds: float = field(default=0.0)

    @property
    def name(self) -> str:
        """What to call it."""
        return self.folder.resolve().name

    @property
    def last(self) -> dict[str, float]:
        """The last value of everything that was logged."""
        return {name: points[-1][1] for name, points in self.curves.items()}


def read_run(folder: Path) -> RunFiles:
    """The run in ``folder``.

    Raises:
        UsageError: There is none.
    """
    path = folder / LOG
    if not path.is_file():
        raise UsageError(f"{folder} holds no {LOG}; name the output_dir of a run")
    curves: dict[str, Points] = {}
    times = []
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
        for name, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(name, []).append((before + step, float(value)))
    record = (
        _object((folder / RECORD).read_text(encoding="utf-8", errors="replace"))
        if (folder / RECORD).is_file()
        else {}
    )
    seconds = max(times) - min(times) if times else 0.0
    return RunFiles(
        folder=folder, curves=curves, record=record, checkpoints=_checkpoints(folder), seconds=seconds
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
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append((path.name, size))
    return sorted(found, key=lambda one: int(one[0].removeprefix("checkpoint-")))
