"""``run.json`` in the ``output_dir``: kind, configuration, versions and plan of a run.

``mca-train report`` reads it. A failure to write it, or to plan the run, does not end the run.
"""

import json
import logging
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mca_config.redaction import redacted_values
from mca_config.types import JsonObject
from mca_models.megatron.factory.transformer_config import choose_implementation
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.memory import plan_layout
from mca_train.plan.report import plan_document
from mca_train.run.plan_input import make_image_check, make_plan_input, planned_media
from mca_train.run.rules import Run

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
