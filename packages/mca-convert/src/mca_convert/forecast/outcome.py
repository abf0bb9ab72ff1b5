"""The request for a forecast, its outcome, and the checks of the destination."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_convert.conversion import require_free_destination
from mca_convert.forecast.stages import PlannedStage
from mca_convert.pool import Limits
from mca_convert.tables import format_size
from mca_models.storage.atomic import staging_parent

T = TypeVar("T")


@dataclass
class Forecast:
    """The outcome of planning: ``refusals`` has the errors that the conversion would raise."""

    source: str
    target: Literal["mca", "hf"]
    kind: str = ""
    config_only: bool = False
    model_type: str = ""
    layout: str = ""
    layout_sizes: JsonObject = field(default_factory=dict)
    """The layout's fields by name."""
    tensors: int = 0
    parameters: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)
    stages: list[PlannedStage] = field(default_factory=list)
    peak_bytes: int = 0
    workers: int = 0
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of ``step``; on an error record it and return None."""
        try:
            return step()
        except McaError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        self.refusals += [line for line in [reason] if line not in self.refusals]
        return None

    def as_dict(self) -> JsonObject:
        """Return the document of ``--json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The conversion to plan.

    Args:
        path: The checkpoint; None if an adapter needs none.
        target: ``mca``, ``hf``, or None for the default.
        arguments: Returns the layout arguments; raises if they contradict each other.
        cast: Safetensors code to cast to.
        limits: Threads and memory.
        max_shard_bytes: Largest file of a Hugging Face target.
        destination: Output path; None if not set.
        adapter: A LoRA adapter to convert, or to merge into the checkpoint.
        merge: Merge it.
        overwrite: Replace a checkpoint at the destination.
        fp8: Write weights of linears as fp8 blocks.
        values: Read all weights and report values that are not finite.
    """

    path: Path | None
    target: Literal["mca", "hf"] | None
    arguments: Callable[[], DistributingParallelArguments]
    cast: str | None
    limits: Limits
    max_shard_bytes: int
    destination: Path | None
    adapter: Path | None = None
    merge: bool = False
    overwrite: bool = False
    fp8: bool = False
    values: bool = False


def check_destination(request: Request, result: Forecast) -> None:
    """Record whether the destination exists, is inside a source, or cannot be written."""
    destination = request.destination
    if destination is not None:
        sources = filter(None, (request.adapter, request.path))
        result.attempt(partial(require_free_destination, sources, destination, overwrite=request.overwrite))
        result.attempt(partial(require_writable, destination))


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def require_writable(destination: Path) -> None:
    """Raise `McaError` if no directory can be created at ``destination``."""
    parent = _existing_parent(destination)
    if not parent.is_dir():
        raise McaError(f"--output_path {destination}: {parent} is not a directory; name another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise McaError(f"--output_path {destination}: {parent} cannot be written to; name another path")


def _existing_parent(destination: Path) -> Path:
    """Return the nearest existing parent of the directory for the files."""
    parent = staging_parent(destination)
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return parent


def require_space(destination: Path | None, result: Forecast) -> None:
    """Record an error if the disk has too little free space."""
    if destination is None:
        return
    parent = result.attempt(lambda: _existing_parent(destination))
    if parent is None:
        return
    free = shutil.disk_usage(parent).free
    if free < result.written_bytes:
        result.refusals.append(
            f"--output_path {destination}: needs {format_size(result.written_bytes)}, {parent} has "
            f"{format_size(free)} free; free space or name another path"
        )
