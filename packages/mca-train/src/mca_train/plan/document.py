"""JSON object of a plan: ``mca-train/plan``, version 1. docs/plan.md explains its keys."""

from collections.abc import Sequence
from dataclasses import asdict

from mca_config.layout import SIZE_FIELDS
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_train.plan.hardware import Device
from mca_train.plan.memory import GIB, Plan
from mca_train.plan.remedies import Remedy
from mca_train.plan.vision_memory import Images

SCHEMA = "mca-train/plan"
VERSION = 1


def plan_document(
    plan: Plan, model: McaModelConfig, device: Device | None = None, remedies: Sequence[Remedy] = ()
) -> JsonObject:
    """Return the JSON object of ``plan``; sizes in bytes."""
    layout = plan.layout
    stages = [asdict(stage) | {"total": stage.total} for stage in plan.stages]
    if device is not None:
        limit = int(device.usable_gib * GIB)
        stages = [stage | {"fits": stage["total"] <= limit} for stage in stages]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "possible": True,
        "problems": [],
        "missing": [],
        "model": {
            "model_type": model.model_type,
            "layers": model.num_layers,
            "parameters": plan.total_parameters,
            "trained_parameters": plan.trained_parameters,
        },
        "world_size": plan.world_size,
        "layout_sizes": {short: getattr(layout, short) for short in SIZE_FIELDS},
        "data_parallel_size": plan.data_parallel_size,
        "implementation": plan.implementation,
        "global_batch": plan.global_batch,
        "tokens_per_step": plan.tokens_per_step,
        "bubble": plan.bubble,
        "images": _images_document(plan.images),
        "device": asdict(device) | {"usable_bytes": int(device.usable_gib * GIB)} if device else None,
        "stages": stages,
        "remedies": [
            {"changes": remedy.changes, "bytes": remedy.needs, "fits": remedy.fits} for remedy in remedies
        ],
    }


def _images_document(images: Images | None) -> JsonObject | None:
    if images is None:
        return None
    return {"in_each_sequence": images.count, "pixels": images.pixels, "tokens_of_each": images.tokens}


def impossible_document(problems: Sequence[str]) -> JsonObject:
    """Return the JSON object of a run that no hardware can run."""
    return {"schema": SCHEMA, "version": VERSION, "possible": False, "problems": list(problems)}
