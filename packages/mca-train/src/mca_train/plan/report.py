"""Report of a plan, with the numbers of `plan.memory`: text, or JSON that docs/reference/json.md explains."""

from collections.abc import Sequence
from dataclasses import asdict

from mca_config.layout import SIZE_FIELDS
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_train.config.model import batch_unit
from mca_train.config.run_config import Settings
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.hardware import Device
from mca_train.plan.memory import GIB, PARTS, Plan, StageNeeds
from mca_train.plan.options import SCHEMA, VERSION
from mca_train.plan.search import Remedy

_FP8 = "fp8          counted: {} of layers' weights, inputs of products; not counted: their scales"
_LAYERS = {"local": "Megatron's own", "transformer_engine": "Transformer Engine's"}


def render(plan: Plan, settings: Settings, model: McaModelConfig, device: Device | None = None) -> str:
    """Render the plan as text, and mark the stages that exceed the memory of ``device``."""
    training, media = settings.training, plan.media or PlannedMedia()
    named_media = (("images", media.images), ("videos", media.videos), ("audio", media.clips))
    suffix = " (LoRA)" if settings.lora.is_enabled else ""
    lines = [
        f"model        {model.model_type}, {plan.total_parameters:,} parameters, {counted(model.num_layers, 'layer')}"
        + ("" if plan.trained_parameters is None else f"; {plan.trained_parameters:,} trained{suffix}"),
        f"ranks        {plan.world_size} = {plan.layout}, data parallel {plan.data_parallel_size}",
        f"global batch {counted(plan.global_batch, batch_unit(training))}, {plan.tokens_per_step:,} tokens = "
        f"micro-batch {training.per_device_train_batch_size} x accumulated {training.gradient_accumulation_steps} x "
        f"data parallel {plan.data_parallel_size}",
        f"bubble       {plan.bubble:.1%} of a step",
        f"layers       {_LAYERS[plan.implementation]}"
        + (f", on {device.name}: {device.usable_gib:.1f} GiB usable" if device else ""),
        *(f"{name:<12} {part}" for name, part in named_media if part),
        *([_FP8.format("two copies" if plan.fp8_copies > 1 else "one copy")] if plan.fp8_copies else []),
        "",
        *_table(plan, device),
        "",
        "GiB of a rank of the stage at its fullest moment; kernels, allocators and communication come on top",
    ]
    evaluating = [stage for stage in plan.stages if stage.evaluation > stage.activations + stage.temporaries]
    if evaluating:
        most = max(stage.evaluation for stage in evaluating) / GIB
        lines.append(
            f"evaluation   per_device_eval_batch_size {training.per_device_eval_batch_size}: {most:.3f} GiB in place "
            "of activations and temporaries, counted in the total"
        )
    first = [stage for stage in plan.stages if stage.weights + stage.beforehand == stage.total]
    if first:
        most = max(stage.beforehand for stage in first) / GIB
        lines.append(
            f"beforehand   precompute_ref_log_probs: {most:.3f} GiB for the reference in addition to the weights, "
            "before there "
            "are gradients and an optimizer; counted in the total"
        )
    if any(stage.worst_routing for stage in plan.stages):
        worst = max(stage.worst_routing for stage in plan.stages) / GIB
        lines.append(
            f"experts      counted with equal shares of tokens; if all went to one rank: {worst:.3f} GiB more"
        )
    return "\n".join(lines) + "\n"


def _table(plan: Plan, device: Device | None) -> list[str]:
    extra = [name for name in ("reference", "host") if any(getattr(stage, name) for stage in plan.stages)]
    titles = {"reference": "reference", "host": "on host"}
    columns = [*PARTS, *(titles[name] for name in extra if name == "reference"), "total GiB"]
    columns += [titles[name] for name in extra if name == "host"]
    lines = [_row("stage", "layers", "parameters", *columns, "in flight")]
    for pp, stage in enumerate(plan.stages):
        sizes = [getattr(stage, name) for name in PARTS]
        sizes += [stage.reference] * ("reference" in extra) + [stage.total] + [stage.host] * ("host" in extra)
        cells = (f"{size / GIB:.3f}" for size in sizes)
        line = _row(str(pp), stage.layers, f"{stage.parameters:,}", *cells, str(stage.in_flight))
        lines.append(line + _mark(stage, device))
    return lines


def _mark(stage: StageNeeds, device: Device | None) -> str:
    if device is None or stage.total <= device.usable_gib * GIB:
        return ""
    return f"  does not fit: {stage.total / GIB - device.usable_gib:.1f} GiB too much"


def render_remedies(remedies: list[Remedy], device: Device) -> str:
    """Render the changes that make a plan fit."""
    if not remedies:
        return f"no single change makes it fit on {device.name}; try --search --gpus N\n"
    fits = remedies[0].fits
    lines = ["any of these makes it fit:" if fits else "no single change makes it fit; these save most:"]
    lines += [f"  {remedy}   ({remedy.needs / GIB:.1f} GiB on the fullest stage)" for remedy in remedies]
    return "\n".join(lines) + "\n"


def _row(stage: str, layers: str, *cells: str) -> str:
    return f"{stage:>5}  {layers:<28}" + "".join(f"{cell:>14}" for cell in cells)


def plan_document(
    plan: Plan, model: McaModelConfig, device: Device | None = None, remedies: Sequence[Remedy] = ()
) -> JsonObject:
    """Return the JSON object of ``plan``; sizes in bytes."""
    layout, media = plan.layout, plan.media or PlannedMedia()
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
        "images": media.images and media.images.document(),
        "videos": media.videos and media.videos.document(),
        "clips": media.clips and media.clips.document(),
        "device": asdict(device) | {"usable_bytes": int(device.usable_gib * GIB)} if device else None,
        "stages": stages,
        "remedies": [
            {"changes": remedy.changes, "bytes": remedy.needs, "fits": remedy.fits} for remedy in remedies
        ],
    }
