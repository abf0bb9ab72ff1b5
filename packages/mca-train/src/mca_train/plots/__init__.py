"""Style and files of all figures: matplotlib without a display, an SVG and a PNG."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mca_config.errors import UsageError

COLOURS = {
    "weights": "#4c78a8",
    "gradients": "#72b7b2",
    "optimizer": "#54a24b",
    "reference": "#b279a2",
    "activations": "#f58518",
    "temporaries": "#e45756",
}
CHUNKS = ("#4c78a8", "#9ecae9", "#54a24b", "#b4e197", "#72b7b2", "#b279a2", "#d6a5c9", "#9d755d")
"""Colours of forward passes, by chunk."""
BACKWARD = ("#f58518", "#ffbf79", "#e45756", "#ff9d98", "#d8b5a5", "#bab0ac", "#eeca3b", "#d67195")


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` before the figures are computed.

    Raises:
        UsageError: The folder cannot be written, or matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install mca-train[plots] or leave --plot out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"--plot {folder}: cannot be written ({error.strerror}); name another directory"
        ) from None


def make_axes(width: float, height: float, title: str, note: str | None = None) -> tuple[Any, Any]:
    """Return a figure and its axes, with ``note`` in small print below."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    if note is not None:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into ``folder``."""
    paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text stays text
        for path in paths:
            figure.savefig(path, dpi=130)
    return paths
