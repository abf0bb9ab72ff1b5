"""Options of ``mca-train plan`` in addition to those of the run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.types import Typed

SCHEMA, VERSION = "mca-train/plan", 1
"""Schema and version in the JSON object of a plan."""


def plan_option(value: str, help: str, default: Typed = None) -> Typed:
    """Return a dataclass field with the placeholder of its value and a help text."""
    return field(default=default, metadata={"value": value, "help": help})


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``mca-train plan``; each field is a flag with its help text."""

    gpus: int | None = plan_option(
        "N", "number of ranks to plan for; default: nproc_per_node, or the fewest that the layout needs"
    )
    device: str | None = plan_option(
        "NAME",
        "device to plan for (h100-80, h200, b200, gb200, ... or gib:N): shows what fits and what would",
    )
    hardware: Path | None = plan_option(
        "FILE", "TOML file that adds devices to the table or changes them, in the form of plan/hardware.toml"
    )
    search: bool = plan_option("", "look for the fastest layouts of --gpus devices", False)
    dry_run: bool = plan_option(
        "", "run one step with the run's own engine on fake tensors, for one rank of each stage", False
    )
    plot: Path | None = plan_option(
        "DIR", "draw the dry run: schedule, memory, layers, messages, as SVG and PNG"
    )
    json: bool = plan_option("", "print one JSON object instead of text", False)
    images: int | None = plan_option(
        "N",
        "images in each sequence of a model with a vision tower; default: one, if the run supports images",
    )
    image_size: int | None = plan_option("PIXELS", "length of each side of an image; default: 448")
    videos: int | None = plan_option("N", "videos in each sequence of a model that takes them; default: none")
    video_frames: int | None = plan_option(
        "FRAMES", "frames of a video that the model sees, before frames are merged; default: 32"
    )
    clips: int | None = plan_option(
        "N",
        "audio clips in each sequence of a model with an audio tower; default: one, if the run supports audio",
    )
    clip_seconds: float | None = plan_option("SECONDS", "length of an audio clip; default: 30")

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus < 1:
            raise UsageError(f"--gpus {self.gpus}: expected at least 1")
        self._check_media()
        if self.search and self.gpus is None:
            raise UsageError("--search looks for layouts of a number of devices; add --gpus N")
        if self.search and (self.dry_run or self.plot is not None):
            raise UsageError("--search excludes --dry_run and --plot; plan a layout that it prints with them")
        if self.hardware is not None and self.device is None:
            raise UsageError(
                "--hardware FILE does nothing without --device NAME, which it may define; add --device"
            )

    def _check_media(self) -> None:
        counts = {"--images": self.images, "--videos": self.videos, "--clips": self.clips}
        for flag, count in counts.items():
            if count is not None and count < 0:
                raise UsageError(f"{flag} {count}: expected 0 or more")
        for flag, size in {"--image_size": self.image_size, "--video_frames": self.video_frames}.items():
            if size is not None and size < 1:
                raise UsageError(f"{flag} {size}: expected at least 1")
        if self.clip_seconds is not None and not 0 < self.clip_seconds < float("inf"):
            raise UsageError(f"--clip_seconds {self.clip_seconds:g}: expected more than 0")

    def render_impossible(self, problems: Sequence[str]) -> str:
        """Return the text, or the JSON object, about a run that no hardware can run."""
        if not self.json:
            return "".join(["this run is impossible:\n", *(f"  - {problem}\n" for problem in problems)])
        document = {"schema": SCHEMA, "version": VERSION, "possible": False, "problems": list(problems)}
        return json.dumps(document, indent=2) + "\n"
