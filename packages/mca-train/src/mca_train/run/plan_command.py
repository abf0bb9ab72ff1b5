"""``mca-train plan``: problems and resources of a run, without reading weights or data."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.checks import position_problem
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.printable import counted
from mca_config.types import JsonObject, Values
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import Target, choose_implementation
from mca_train.config.model import batch_unit, planned_ranks, resolve_layout, samples_per_step
from mca_train.config.run_config import Settings, with_directories
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.chunks import Implementation
from mca_train.plan.hardware import Hardware, load_hardware
from mca_train.plan.memory import Plan, PlanInput, plan_layout
from mca_train.plan.options import PlanOptions
from mca_train.plan.report import plan_document, render, render_remedies
from mca_train.plan.search import (
    LORA_RANK,
    OVERLAPS,
    Remedy,
    explain_shortage,
    find_remedies,
    stages_over_limit,
    with_changes,
)
from mca_train.run import layout_search
from mca_train.run.logs import silent_arguments
from mca_train.run.plan_input import make_image_check, make_plan_input, planned_media
from mca_train.run.rules import Findings, Run, check
from mca_train.run.settings import make_settings
from mca_train.tasks import TASKS, infer_task
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_train.dry_run.stages import DryRun

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_DEVICE_OPTIONS = (
    "transformer_impl",
    "attention_backend",
    "cp_comm_type",
    "fp8",
    "fp8_recipe",
    "tp_comm_overlap",
    "cpu_offloading",
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "cross_entropy_fusion_impl",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
)
"""Keys with values that a GPU or Transformer Engine supports, but this machine may not."""
_UNWRITTEN = "runs/plan"
"""``output_dir`` of a plan without one; nothing is written there."""


def print_plan(task: Task | None, values: Values, where: str, options: PlanOptions) -> int:
    """Print the plan of a configuration file and return the exit code.

    It is 2 if the run is impossible, and 1 if a search finds no layout.

    Args:
        task: The kind of run; None: inferred from the keys.
        values: Keys and values of the configuration.
        where: Their origin for error messages.
        options: Flags of the command.
    """
    for name in _LAUNCHER_VARIABLES:  # this process is not a rank, even if a launcher started it
        os.environ.pop(name, None)
    hardware = load_hardware(options.device, options.hardware) if options.device else None
    named, task = task is not None, task or infer_task(values)
    values = {"output_dir": _UNWRITTEN, **with_directories(values, only="config")}
    settings = make_settings(task, values, where, [flag.name for flag in fields(options)])
    if options.search:
        with silent_arguments():
            return _search(task, values, settings, options, named=named)
    target = _target(settings, hardware)
    findings = check(task, settings, lambda *run: options.gpus or planned_ranks(*run), target)
    if findings.impossible or findings.run is None:
        return _print_impossible(findings.impossible, options)
    media = _Media.from_run(findings.run, target, options)
    if media.impossible:
        return _print_impossible(media.refused, options)
    if options.plot is not None:
        from mca_train.plots import prepare_folder

        prepare_folder(options.plot)
    planned = _Planned.from_run(findings.run, hardware, media)
    dry_run = None
    if options.dry_run or options.plot:
        run = findings.run if target is None else _without_device_options(findings.run)
        dry_run = _dry_run(run, planned, ordered=options.plot is not None)
    if options.plot is not None and dry_run is not None:
        planned.draw(options.plot, dry_run)
    if options.json:
        sys.stdout.write(json.dumps(planned.document(findings, dry_run), indent=2) + "\n")
    else:
        sys.stdout.write(_first_line(task, named=named) + planned.text(findings, dry_run))
    return 0


def _first_line(task: Task, *, named: bool) -> str:
    """Return the line about the kind of run, with the usage if it was inferred."""
    hint = "" if named else f" by its keys; for another kind: mca-train plan {'|'.join(TASKS)} CONFIG.yaml"
    return f"run          mca-train {task.name}{hint}\n"


def _search(task: Task, values: Values, settings: Settings, options: PlanOptions, *, named: bool) -> int:
    """Print the best layouts; the configuration's own layout only determines the samples of a step."""
    gpus = options.gpus or 1
    hardware = load_hardware(options.device or "h100-80", options.hardware)
    requested = settings.training
    settings, findings = _possible(task, layout_search.with_one_rank(values), settings.where, hardware, gpus)
    if findings.impossible or findings.run is None:
        return _print_impossible(findings.impossible, options)
    run, target = findings.run, _target(settings, hardware)
    media = _Media.from_run(run, target, options)
    if media.impossible:
        return _print_impossible(media.refused, options)
    batch = samples_per_step(requested, resolve_layout(requested, run.model), gpus)
    plan_input = make_plan_input(
        run, _implementation(settings, hardware), hardware.device, media=media.counted
    )
    found = layout_search.best_layouts(task, values, run, plan_input, batch, hardware, media.allow)
    shortage = None
    if not found.checked:
        adapted = _with_adapter(task, values, settings.where, hardware, gpus, media)
        shortage = explain_shortage(
            plan_input, settings.training, batch, gpus, hardware, media.allow, adapted
        )
    if options.json:
        document = layout_search.document(found, batch, gpus, hardware, shortage)
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        shown = counted(batch, batch_unit(requested))
        text = layout_search.render(found, shown, gpus, hardware, shortage) + media.explanation()
        sys.stdout.write(_first_line(task, named=named) + text)
    return 0 if found.layouts else 1


def _with_adapter(
    task: Task, values: Values, where: str, hardware: Hardware, gpus: int, media: "_Media"
) -> PlanInput | None:
    """Return the input of the plan of an adapter; None: the run has one, or cannot train one."""
    if values.get("lora_rank") or values.get("adapter_name_or_path"):
        return None
    adapter = {**layout_search.with_one_rank(values), "lora_rank": LORA_RANK}
    try:
        settings, findings = _possible(task, adapter, where, hardware, gpus)
    except McaError:
        return None
    if findings.impossible or findings.run is None:
        return None
    implementation = _implementation(settings, hardware)
    return make_plan_input(findings.run, implementation, hardware.device, media=media.counted)


def _possible(
    task: Task, values: Values, where: str, hardware: Hardware, gpus: int
) -> tuple[Settings, Findings]:
    """Check the run of ``values`` with the best of `OVERLAPS` that it allows."""
    found: list[tuple[Settings, Findings]] = []
    for overlap in OVERLAPS:
        try:
            settings = make_settings(task, {**values, **overlap}, where)
        except McaError:
            if not found and overlap is OVERLAPS[-1]:
                raise
        else:
            found.append((settings, check(task, settings, lambda *_: gpus, _target(settings, hardware))))
            if not found[-1][1].impossible:
                break
    return min(found, key=lambda pair: len(pair[1].impossible))


def _target(settings: Settings, hardware: Hardware | None) -> "Target | None":
    """Return the target of the plan: a device, or Transformer Engine's layers; None: this machine."""
    if hardware is None and settings.training.transformer_impl != "transformer_engine":
        return None
    return Target.planned(_implementation(settings, hardware))


def _without_device_options(run: Run) -> Run:
    """Return ``run`` without options that this machine does not support, for a dry run here."""
    if platform.engine_problem() is None:
        return run
    removed: JsonObject = dict.fromkeys(_DEVICE_OPTIONS)
    if run.settings.training.moe_token_dispatcher_type == "flex":
        removed["moe_token_dispatcher_type"] = None
    training = with_changes(run.settings.training, removed)
    return replace(run, settings=replace(run.settings, training=training))


def _print_impossible(problems: Sequence[str], options: PlanOptions) -> int:
    """Print the problems of a run that no hardware can run, and return the exit code."""
    sys.stdout.write(options.render_impossible(problems))
    return 2


@dataclass(frozen=True)
class _Media:
    """The planned media, and the problems of training with them."""

    counted: PlannedMedia | None
    refused: tuple[str, ...]
    impossible: bool
    """True if the run needs media but cannot use them."""
    problems: Callable[[ParallelLayout], list[str]]

    @classmethod
    def from_run(cls, run: Run, target: "Target | None", options: PlanOptions) -> "_Media":
        """Return the media of ``run``; a default number that the run cannot use counts as none."""
        media = planned_media(run, options)
        if media is None:
            return cls(None, (), False, lambda _: [])
        problems = make_image_check(run, target)
        refused = tuple(f"images: {problem}" for problem in problems(run.layout))
        requests = (options.images, options.image_size, options.clips, options.clip_seconds)
        requested = any(each is not None for each in (*requests, options.videos, options.video_frames))
        needed = requested or bool(media.trained - {"language"})
        return cls(None if refused else media, refused, bool(refused) and needed, problems)

    def allow(self, layout: ParallelLayout) -> bool:
        """Return whether ``layout`` supports the planned media."""
        return self.counted is None or not self.problems(layout)

    def explanation(self) -> str:
        """Return why no media are counted; empty if they are."""
        return "".join(f"{problem} (none were counted)\n" for problem in self.refused)


@dataclass(frozen=True)
class _Planned:
    """A run, its plan, and the hardware of the plan."""

    run: Run
    plan: Plan
    hardware: Hardware | None
    remedies: list[Remedy]
    media: _Media

    @classmethod
    def from_run(cls, run: Run, hardware: Hardware | None, media: _Media) -> "_Planned":
        """Plan ``run``."""
        implementation = _implementation(run.settings, hardware)
        plan_input = make_plan_input(
            run, implementation, hardware.device if hardware else None, media=media.counted
        )
        training = run.settings.training
        plan = plan_layout(plan_input, training, run.layout, run.world_size)
        found: list[Remedy] = []
        if hardware is not None and stages_over_limit(plan, hardware.device):
            found = find_remedies(plan_input, training, run.layout, run.world_size, hardware.device)
        return cls(run, plan, hardware, found, media)

    def text(self, findings: Findings, dry_run: "DryRun | None") -> str:
        """Return the plan as text."""
        device = self.hardware.device if self.hardware else None
        settings = self.run.settings
        text = render(self.plan, settings, self.run.model, device)
        if device is not None and stages_over_limit(self.plan, device):
            text += render_remedies(self.remedies, device)
        if dry_run is not None:
            from mca_train.dry_run.stages import render_dry_run

            text += "\n" + render_dry_run(dry_run)
        if problem := position_problem(self.run.model, settings.data.seq_length):
            text += f"seq_length {settings.data.seq_length}: {problem}\n"
        text += self.media.explanation()
        if findings.missing:
            text += "".join(["this run cannot start here:\n", *(f"  - {p}\n" for p in findings.missing)])
        return text

    def draw(self, folder: Path, dry_run: "DryRun") -> None:
        """Draw the figures of the plan into ``folder``."""
        from mca_train.plots.figures import draw_all

        run = self.run
        limit = self.hardware.device.usable_gib if self.hardware else None
        chunks = replace(run.model, layout=run.layout).pipeline_plan()
        draw_all(folder, dry_run, chunks, RankGrid(run.layout, run.world_size), limit)

    def document(self, findings: Findings, dry_run: "DryRun | None") -> JsonObject:
        """Return the plan as a JSON object."""
        device = self.hardware.device if self.hardware else None
        document = plan_document(self.plan, self.run.model, device, self.remedies)
        document["missing"] = list(findings.missing)
        if dry_run is not None:
            from mca_train.dry_run.stages import dry_run_document

            document["dry_run"] = dry_run_document(dry_run)
        return document


def _implementation(settings: Settings, hardware: Hardware | None) -> Implementation:
    """Return the layer implementation: as requested, else Transformer Engine on a device, else this machine's."""
    if (requested := settings.training.transformer_impl) is not None:
        return requested
    return "transformer_engine" if hardware is not None else choose_implementation(settings.training)


def _dry_run(run: Run, planned: _Planned, *, ordered: bool) -> "DryRun":
    """Return the dry run of ``run``, which this machine supports."""
    from mca_train.dry_run.stages import DryRun, measure_stages

    implementation, device = _implementation(run.settings, None), planned.hardware and planned.hardware.device
    note = None
    if implementation != planned.plan.implementation:
        where = f" on {device.name}" if device else ""
        note = f"measured with Megatron's own layers; Transformer Engine's{where} keep less"
    return DryRun(
        stages=measure_stages(
            run.task,
            run.settings,
            run.model,
            run.layout,
            run.world_size,
            ordered=ordered,
            media=planned.media.counted,
        ),
        accumulated=run.settings.training.gradient_accumulation_steps,
        implementation=implementation,
        note=note,
    )
