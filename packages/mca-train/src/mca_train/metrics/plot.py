"""``loss.png``: the losses of a run by step, drawn at its end if matplotlib is installed (the extra ``plots``)."""

import logging
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "loss.png"


def plot_losses(history: Iterable[Mapping[str, float]], folder: Path) -> Path | None:
    """Draw ``loss``, ``eval_loss`` and the losses of sources; return the file, or None if nothing can be drawn."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for log in history:
        for name, value in log.items():
            if name in ("loss", "eval_loss") or name.startswith("loss/"):
                curves.setdefault(name, []).append((int(log["step"]), float(value)))
    if not curves or find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure  # without pyplot, which would choose a window

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, losses = zip(*points, strict=True)
        axes.plot(steps, losses, label=name, marker="o" if len(points) < 20 else None)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    path = folder / NAME
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        logger.warning("%s: cannot be written (%s)", path, error.strerror)
        return None
    return path
