"""The flags that only ``mca-train plan`` has; all others are the run's."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mca_config.errors import UsageError
from mca_train.config.source import parse_overrides


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan and how to say it.

    Args:
        dry_run: Run a step without memory and ranks.
        gpus: Ranks to plan for; None: those that ``local_ranks`` says, else the fewest that the layout stands on.
        device: Of the table, or ``gib:N``; None: nothing is said of what fits.
        hardware: A file that adds to the table.
        search: Look for layouts.
        plot: Folder for pictures.
        json: One object instead of text.
    """

    dry_run: bool = False
    gpus: int | None = None
    device: str | None = None
    hardware: Path | None = None
    search: bool = False
    plot: Path | None = None
    json: bool = False

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus < 1:
            raise UsageError(f"--gpus {self.gpus}: expected at least 1")
        if self.search and self.gpus is None:
            raise UsageError("--search looks for layouts of a number of devices; add --gpus N")
        if self.hardware is not None and self.device is None:
            raise UsageError("--hardware FILE does nothing without --device NAME, which it may define")


def own_options(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """The plan's options among ``words``, and the other words.

    Raises:
        UsageError: A value is missing or wrong.
    """
    names = {field.name for field in fields(PlanOptions)}
    mine: list[str] = []
    others: list[str] = []
    target = others
    for word in words:
        if word.startswith("--") and len(word) > 2:
            target = mine if word[2:].partition("=")[0].replace("-", "_") in names else others
        target.append(word)
    given = parse_overrides(mine)
    return PlanOptions(**{name: _typed(name, value) for name, value in given.items()}), others


def _typed(name: str, value: object) -> Any:
    if name in ("dry_run", "search", "json"):
        expected, fits = "no value", isinstance(value, bool)
    elif name == "gpus":
        expected, fits = "a whole number", isinstance(value, int) and not isinstance(value, bool)
    else:
        expected, fits = "a name or path", isinstance(value, str)
    if not fits:
        raise UsageError(f"--{name} takes {expected}, not {value!r:.80}")
    return Path(str(value)) if name in ("hardware", "plot") else value
