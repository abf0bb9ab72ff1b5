"""``mca-train plan`` prints what is wrong with a run and what it needs.

Nothing is trained, and no weight and no row is read.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.checks import positions_exceeded
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import LaunchArguments
from mca_train.config.model import planned_ranks
from mca_train.config.run_config import Settings, given_values
from mca_train.plan.chunks import Implementation
from mca_train.plan.document import document_of, impossible
from mca_train.plan.fitting import Remedy, changed, over, remedies
from mca_train.plan.hardware import Hardware, hardware_of
from mca_train.plan.memory import Plan, plan_of
from mca_train.plan.options import PlanOptions
from mca_train.plan.report import render, render_remedies
from mca_train.plan.towers import Images
from mca_train.run.checks import Findings, Run, check, settings_of
from mca_train.run.hub_paths import with_directories
from mca_train.run.logs import silent_arguments
from mca_train.run.subject import image_check, images_of_run, subject_of
from mca_train.tasks.table import TASKS, task_of
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.megatron.factory.target import Target
    from mca_train.dry_run.report import DryRun

_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_OF_DEVICES = (
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
"""Keys of which a GPU, or Transformer Engine's layers, take what this machine may not."""


def print_plan(task: Task | None, config: Path | None, overrides: list[str], options: PlanOptions) -> int:
    """Prints the plan of a configuration file; 2 if the run is impossible.

    Args:
        task: The kind of run; None: the one whose keys are given.
        config: The YAML file; None: the overrides are all.
        overrides: ``--key value`` words.
        options: What to plan, and how to print it.
    """
    for name in _OF_A_LAUNCHER:  # whoever has started this process: it is no rank
        os.environ.pop(name, None)
    hardware = hardware_of(options.device, options.hardware) if options.device else None
    values, where = given_values(config, overrides)
    named, task = task is not None, task or task_of(values)
    values = with_directories(values, only="config")
    settings = settings_of(task, values, where, [flag.name for flag in fields(options)])
    if options.search:
        with silent_arguments():
            return _search(task, values, settings, options, named=named)
    target = _target(settings, hardware)
    findings = check(task, settings, _ranks_of(options), target)
    if findings.impossible or findings.run is None:
        _say_impossible(findings, options)
        return 2
    images = _PlannedImages.of(findings.run, target, options)
    if images.impossible:
        _say_impossible(replace(findings, impossible=images.refused), options)
        return 2
    if options.plot is not None:
        from mca_train.plots.drawing import ready

        ready(options.plot)
    planned = _Planned.of(findings.run, hardware, images)
    dry_run = None
    if options.dry_run or options.plot:
        run = findings.run if target is None else _here(findings.run)
        dry_run = _dry_run(run, planned, ordered=options.plot is not None)
    if options.plot is not None and dry_run is not None:
        planned.draw(options.plot, dry_run)
    if options.json:
        sys.stdout.write(json.dumps(planned.document(findings, dry_run), indent=2) + "\n")
    else:
        sys.stdout.write(_first_line(task, named=named) + planned.text(findings, dry_run))
    return 0


def _first_line(task: Task, *, named: bool) -> str:
    """Which kind of run is planned, and how to name one if none was."""
    told = "" if named else f" by its keys; for another kind: mca-train plan {'|'.join(TASKS)} CONFIG.yaml"
    return f"run          mca-train {task.name}{told}\n"


def _search(task: Task, values: Values, settings: Settings, options: PlanOptions, *, named: bool) -> int:
    """Prints the best layouts; the layout of the configuration only says how many samples a step has."""
    from mca_train.run import searching

    gpus = options.gpus or 1
    hardware = hardware_of(options.device or "h100-80", options.hardware)
    given = settings
    settings, findings = _possible(task, searching.on_one_rank(values), settings.where, hardware, gpus)
    if findings.impossible or findings.run is None:
        _say_impossible(findings, options)
        return 2
    run, target = findings.run, _target(settings, hardware)
    images = _PlannedImages.of(run, target, options)
    if images.impossible:
        _say_impossible(replace(findings, impossible=images.refused), options)
        return 2
    batch = searching.batch_of(given, run.model, gpus)
    subject = subject_of(run, _implementation(settings, hardware), hardware.device, images=images.counted)
    found = searching.best_layouts(task, values, run, subject, batch, hardware, images.allow)
    if options.json:
        sys.stdout.write(json.dumps(searching.document(found, batch, gpus, hardware), indent=2) + "\n")
    else:
        text = searching.render(found, batch, gpus, hardware) + images.told()
        sys.stdout.write(_first_line(task, named=named) + text)
    return 0


def _possible(
    task: Task, values: Values, where: str, hardware: Hardware, gpus: int
) -> tuple[Settings, Findings]:
    """The run of ``values`` with the best of `OVERLAPS` that it does not exclude."""
    from mca_train.plan.search import OVERLAPS

    found: list[tuple[Settings, Findings]] = []
    for overlap in OVERLAPS:
        try:
            settings = settings_of(task, {**values, **overlap}, where)
        except McaError:
            if not found and overlap is OVERLAPS[-1]:
                raise
        else:
            found.append((settings, check(task, settings, lambda *_: gpus, _target(settings, hardware))))
            if not found[-1][1].impossible:
                break
    return min(found, key=lambda each: len(each[1].impossible))


def _target(settings: Settings, hardware: Hardware | None) -> "Target | None":
    """What is planned for: a device, or layers that only one has; None: this machine."""
    from mca_models.megatron.factory.target import Target

    if hardware is None and settings.training.transformer_impl != "transformer_engine":
        return None
    return Target.planned(_implementation(settings, hardware))


def _here(run: Run) -> Run:
    """The same without what only another device does, if this machine has none like it."""
    from mca_models.megatron import platform

    if platform.no_engine() is None:
        return run
    left_out: JsonObject = dict.fromkeys(_OF_DEVICES)
    if run.settings.training.moe_token_dispatcher_type == "flex":
        left_out["moe_token_dispatcher_type"] = None
    training = changed(run.settings.training, left_out)
    return replace(run, settings=replace(run.settings, training=training))


def _ranks_of(options: PlanOptions) -> Callable[[LaunchArguments, ParallelLayout], int]:
    def ranks(launch: LaunchArguments, layout: ParallelLayout) -> int:
        return options.gpus or planned_ranks(launch, layout)

    return ranks


def _say_impossible(findings: Findings, options: PlanOptions) -> None:
    if options.json:
        sys.stdout.write(json.dumps(impossible(findings.impossible), indent=2) + "\n")
        return
    sys.stdout.write("".join(["this run is impossible:\n", *(f"  - {p}\n" for p in findings.impossible)]))


@dataclass(frozen=True)
class _PlannedImages:
    """The images that are counted, and what keeps the run from taking any."""

    counted: Images | None
    refused: tuple[str, ...]
    impossible: bool
    """Whether the run has to take images, and cannot."""
    problems: Callable[[ParallelLayout], list[str]]

    @classmethod
    def of(cls, run: Run, target: "Target | None", options: PlanOptions) -> "_PlannedImages":
        """Those of ``run``: of a default that the run cannot take none are counted."""
        images = images_of_run(run, options.images, options.image_size)
        if images is None:
            return cls(None, (), False, lambda _: [])
        problems = image_check(run, target)
        refused = tuple(f"images: {problem}" for problem in problems(run.layout))
        asked = options.images is not None or options.image_size is not None
        needed = asked or bool(images.trained - {"language"})
        return cls(None if refused else images, refused, bool(refused) and needed, problems)

    def allow(self, layout: ParallelLayout) -> bool:
        """Whether what is counted can be run there."""
        return self.counted is None or not self.problems(layout)

    def told(self) -> str:
        """Why none are counted, as text."""
        return "".join(f"{problem} (none were counted)\n" for problem in self.refused)


@dataclass(frozen=True)
class _Planned:
    """A run, its plan, and what it is planned on."""

    run: Run
    plan: Plan
    hardware: Hardware | None
    remedies: list[Remedy]
    images: _PlannedImages

    @classmethod
    def of(cls, run: Run, hardware: Hardware | None, images: _PlannedImages) -> "_Planned":
        """The plan of ``run``."""
        implementation = _implementation(run.settings, hardware)
        subject = subject_of(
            run, implementation, hardware.device if hardware else None, images=images.counted
        )
        training = run.settings.training
        plan = plan_of(subject, training, run.layout, run.world_size)
        found: list[Remedy] = []
        if hardware is not None and over(plan, hardware.device):
            found = remedies(subject, training, run.layout, run.world_size, hardware.device)
        return cls(run, plan, hardware, found, images)

    def text(self, findings: Findings, dry_run: "DryRun | None") -> str:
        """For people."""
        device = self.hardware.device if self.hardware else None
        settings = self.run.settings
        told = render(self.plan, settings, self.run.model, device)
        if device is not None and over(self.plan, device):
            told += render_remedies(self.remedies, device)
        if dry_run is not None:
            from mca_train.dry_run.report import render_dry_run

            told += "\n" + render_dry_run(dry_run)
        if long := positions_exceeded(self.run.model, settings.data.seq_length):
            told += f"seq_length {settings.data.seq_length}: {long}\n"
        told += self.images.told()
        if findings.missing:
            told += "".join(
                ["what keeps this run from starting here:\n", *(f"  - {p}\n" for p in findings.missing)]
            )
        return told

    def draw(self, folder: Path, dry_run: "DryRun") -> None:
        """Pictures."""
        from mca_train.plots.pictures import draw_all

        run = self.run
        limit = self.hardware.device.usable_gib if self.hardware else None
        chunks = replace(run.model, layout=run.layout).pipeline_plan()
        draw_all(folder, dry_run, chunks, RankGrid(run.layout, run.world_size), limit)

    def document(self, findings: Findings, dry_run: "DryRun | None") -> JsonObject:
        """For programs."""
        device = self.hardware.device if self.hardware else None
        found = document_of(self.plan, self.run.model, device, self.remedies)
        found["missing"] = list(findings.missing)
        if dry_run is not None:
            from mca_train.dry_run.report import document_of_dry_run

            found["dry_run"] = document_of_dry_run(dry_run)
        return found


def _implementation(settings: Settings, hardware: Hardware | None) -> Implementation:
    """Whose layers to count: those asked for, on a device Transformer Engine's, else what this machine would use."""
    from mca_models.megatron.factory.transformer_config import implementation_of

    asked = settings.training.transformer_impl
    if asked is not None:
        return asked
    return "transformer_engine" if hardware is not None else implementation_of(settings.training)


def _dry_run(run: Run, planned: _Planned, *, ordered: bool) -> "DryRun":
    """Of ``run``, which is what this machine can do of what is planned."""
    from mca_train.dry_run.report import DryRun
    from mca_train.dry_run.stages import needs_of_stages

    implementation, device = _implementation(run.settings, None), planned.hardware and planned.hardware.device
    note = None
    if implementation != planned.plan.implementation:
        where = f" on {device.name}" if device else ""
        note = f"measured with Megatron's own layers; Transformer Engine's{where} keep less"
    return DryRun(
        stages=needs_of_stages(
            run.task,
            run.settings,
            run.model,
            run.layout,
            run.world_size,
            ordered=ordered,
            images=planned.images.counted,
        ),
        accumulated=run.settings.training.gradient_accumulation_steps,
        implementation=implementation,
        note=note,
    )
