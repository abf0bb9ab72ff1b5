"""What planning finds: the request, its outcome, and what stands in the way of the output. It opens no source."""

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
    """The outcome of planning: ``refusals`` is empty if the conversion would go through."""

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
        """The result of ``step``; None if it is refused, which is noted."""
        try:
            return step()
        except McaError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        self.refusals += [line for line in [reason] if line not in self.refusals]
        return None

    def as_dict(self) -> JsonObject:
        """For ``--json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for.

    Args:
        path: The checkpoint; None where an adapter needs none.
        target: ``mca``, ``hf``, or None for the natural one.
        arguments: Makes the layout arguments; raises if they contradict each other.
        cast: Safetensors code to cast to.
        limits: Threads and memory.
        max_shard_bytes: Of a Hugging Face target.
        destination: Where it would go; None if not said.
        adapter: A LoRA adapter to convert, or to fold into the checkpoint.
        merge: Fold it.
        overwrite: Replace a checkpoint that stands at the destination.
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
    """Note whether the destination is taken, or lies inside what is read."""
    destination = request.destination
    if destination is not None:
        sources = filter(None, (request.adapter, request.path))
        result.attempt(partial(require_free_destination, sources, destination, overwrite=request.overwrite))
        result.attempt(partial(require_writable, destination))


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def require_writable(destination: Path) -> None:
    """Raise if no directory can be made at ``destination``."""
    place = _existing_parent(destination)
    if not place.is_dir():
        raise McaError(f"--output_path {destination}: {place} is not a directory; name another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise McaError(f"--output_path {destination}: {place} cannot be written to; name another place")


def _existing_parent(destination: Path) -> Path:
    """What exists of the path to where the files would be written."""
    place = staging_parent(destination)
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def require_space(destination: Path | None, result: Forecast) -> None:
    """Note it if the disk has no room for what would be written."""
    if destination is None:
        return
    place = result.attempt(lambda: _existing_parent(destination))
    if place is None:
        return
    free = shutil.disk_usage(place).free
    if free < result.written_bytes:
        result.refusals.append(
            f"--output_path {destination}: needs {format_size(result.written_bytes)}, {place} has "
            f"{format_size(free)} free; make room or name another place"
        )
