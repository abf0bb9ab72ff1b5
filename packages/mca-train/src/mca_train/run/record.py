"""Records of a run: ``run.json`` at its start, and at its end a summary, and ``loss.png`` if matplotlib is installed.

``run.json`` has kind, configuration, versions and plan; ``mca-train report`` reads it. A failure to write it, or to
plan the run, does not end the run.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.redaction import redacted_values
from mca_config.types import JsonObject
from mca_models.megatron.factory.transformer_config import choose_implementation
from mca_train.checkpoint.output_files import HF_FOLDER
from mca_train.metrics.logs import JsonlLog
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.memory import plan_layout
from mca_train.plan.report import plan_document
from mca_train.run.plan_input import make_image_check, make_plan_input, planned_media
from mca_train.run.rules import Run

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

    from mca_train.trainer.trainer import McaTrainer

logger = logging.getLogger(__name__)

SCHEMA, VERSION = "mca-train/run", 1
_PACKAGES = ("mca-train", "mca-models", "megatron-core", "torch", "transformers", "transformer-engine")


def make_record(run: Run) -> JsonObject:
    """Return the contents of ``run.json``."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "began": round(time.time(), 3),
        "task": run.task.name,
        "world_size": run.world_size,
        "layout": str(run.layout),
        "configuration": redacted_values(run.settings.values),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "plan": _plan(run),
    }


def _plan(run: Run) -> JsonObject | None:
    training = run.settings.training
    try:
        plan_input = make_plan_input(run, choose_implementation(training), media=_media(run))
        return plan_document(plan_layout(plan_input, training, run.layout, run.world_size), run.model)
    except Exception as error:  # the run does not depend on it
        logger.warning("run.json has no plan of this run: %s: %s", type(error).__name__, error)
        return None


def _media(run: Run) -> PlannedMedia | None:
    """Return the media that ``mca-train plan`` counts for the run by default."""
    media = planned_media(run)
    return None if media is None or make_image_check(run, None)(run.layout) else media


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_record(run: Run) -> None:
    """Write ``run.json``."""
    path = Path(run.settings.training.output_dir) / "run.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make_record(run), indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s: cannot be written (%s)", path, error.strerror)


PLOT_FILE = "loss.png"


def summary(trainer: "McaTrainer", result: "TrainOutput") -> str:
    """Return the text with steps, speed, losses and output paths."""
    output = Path(trainer.args.output_dir)
    history = trainer.state.log_history
    evaluated = _evaluation(trainer)
    speed = averages(history, since=trainer.started_at_step)
    if result.global_step == trainer.started_at_step:
        ending = f"the checkpoint is at step {result.global_step} already, the end of the run"
        lines = {"steps": f"none; {ending}", "model": str(output)}
        return "\n".join(f"{name:<5}  {value}" for name, value in lines.items())
    lines = {
        "steps": f"{_steps(trainer.started_at_step, result.global_step)} in {result.metrics['train_runtime']:.1f} s"
        + (f"; {speed['step_time']:.3g} s for each, without saving and evaluating" if speed else ""),
        "tokens in all" if trainer.started_at_step else "tokens": f"{trainer.state.num_input_tokens_seen:,}"
        + (f" ({speed['tokens_per_second']:,.0f} per second)" if speed else ""),
        **({"speed": _flops(speed)} if "model_tflops" in speed else {}),
        "training loss": f"{result.training_loss:.4f} (mean of the run)",
        **({"evaluation loss": evaluated} if evaluated else {}),
        "model": str(output),
        **({"Hugging Face model": str(output / HF_FOLDER)} if trainer.args.save_hf_model else {}),
        "log": str(output / JsonlLog.name),
        **({"plot": str(output / PLOT_FILE)} if (output / PLOT_FILE).is_file() else {}),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _steps(before: int, last: int) -> str:
    """Return the number of steps of this run, with their range after a resume."""
    if not before:
        return str(last)
    return f"{last - before} ({before + 1} to {last})" if last - before > 1 else f"1 (step {last})"


def best_step(trainer: "McaTrainer") -> int | None:
    """Return the step of the best model if it was loaded at the end; None: the final model is the last one."""
    if not trainer.args.load_best_model_at_end or trainer.state.best_model_checkpoint is None:
        return None
    return int(trainer.state.best_global_step)


def _evaluation(trainer: "McaTrainer") -> str | None:
    """Return the loss of the final model; None: it was not evaluated."""
    best = best_step(trainer)
    logs = [log for log in trainer.state.log_history if "eval_loss" in log]
    if best is not None:
        logs = [log for log in logs if log["step"] == best]
    if not logs:
        return None
    return f"{logs[-1]['eval_loss']:.6f}" + (f" (the best, of step {best})" if best is not None else "")


def _flops(speed: Mapping[str, float]) -> str:
    mfu = f", MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
    return f"{speed['model_tflops']:.4g} model TFLOP/s{mfu}"


def averages(history: Iterable[Mapping[str, float]], since: int = 0) -> dict[str, float]:
    """Return time-weighted means of the speeds in logs after step ``since``; empty without such logs."""
    totals: dict[str, float] = {}
    seconds, before, steps = 0.0, since, 0
    for log in history:
        if "step_time" not in log or log["step"] <= since:
            continue
        took = int(log["step"]) - before
        before, steps = int(log["step"]), steps + took
        seconds += took * log["step_time"]
        for name in ("tokens_per_second", "model_tflops", "mfu"):
            if name in log:
                totals[name] = totals.get(name, 0.0) + log[name] * took * log["step_time"]
    if not seconds:
        return {}
    return {"step_time": seconds / steps} | {name: total / seconds for name, total in totals.items()}


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
    path = folder / PLOT_FILE
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        logger.warning("%s: cannot be written (%s)", path, error.strerror)
        return None
    return path
