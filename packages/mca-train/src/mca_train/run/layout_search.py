"""``mca-train plan --search`` prints the layouts that fit a number of devices and are predicted to be fastest."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from time import process_time
from typing import TYPE_CHECKING

import yaml

from mca_config.errors import McaError, list_problems
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_config.model_config import McaModelConfig, training_dtype
from mca_config.printable import counted
from mca_config.types import JsonObject, Values
from mca_train.config.model import resolve_layout
from mca_train.config.run_config import Settings
from mca_train.plan.hardware import Hardware
from mca_train.plan.memory import GIB, PlanInput
from mca_train.plan.remedies import with_changes
from mca_train.plan.search import LAYOUT_KEYS, Fit, TimedLayout, fitting_layouts, with_step_time
from mca_train.run.checks import Run, check, make_settings

if TYPE_CHECKING:
    from mca_models.megatron.factory.target import Target
    from mca_train.tasks.task import Task

SCHEMA, VERSION = "mca-train/search", 1
_SHOWN = 5
_COMPARED = 40
"""Layouts that pass the check, whose steps are then predicted in full."""
_SECONDS = 10.0
"""Of one core, after which no more are checked than so many."""


@dataclass(frozen=True)
class Best:
    """What a search has found.

    Args:
        layouts: The fastest that pass the check of runs, at most one for each layout.
        checked: How many that fit were checked.
        refused: What was wrong with them, and with how many.
        cut: Whether there was no time to check the rest.
    """

    layouts: list[TimedLayout]
    checked: int
    refused: Counter[str]
    cut: bool


def best_layouts(
    task: "Task",
    values: Values,
    run: Run,
    subject: PlanInput,
    batch: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool],
) -> Best:
    """Check those that fit, the fastest first, until enough have passed.

    Args:
        task: The kind of run.
        values: Its keys and values.
        run: It, on no layout.
        subject: What is trained.
        batch: Samples of a step.
        hardware: What its ranks are.
        allowed: Says of a layout whether the run may stand on it.
    """
    from mca_models.megatron.factory.target import Target

    gpus, target = run.world_size, Target.planned(subject.implementation)
    attends, began = _attention_check(run, target), process_time()

    def stands(layout: ParallelLayout) -> bool:
        return attends(layout.tp, layout.cp) and allowed(layout)

    given = dict.fromkeys(name for name in values if name in LAYOUT_KEYS)  # unset where it is not found again
    passing: list[Fit] = []
    refused, checked, cut = Counter[str](), 0, False
    for fit in fitting_layouts(subject, run.settings.training, batch, gpus, hardware, stands):
        cut = checked >= _COMPARED and process_time() - began > _SECONDS
        if cut or len(passing) == _COMPARED:
            break
        one = replace(fit, changes=given | fit.changes)
        problems = _problems(task, values, one.changes, gpus, target)
        checked += 1
        refused.update(problems)
        passing += [] if problems else [one]
    best: dict[str, TimedLayout] = {}
    found = (with_step_time(subject, one, gpus, hardware) for one in passing)
    for each in sorted(found, key=lambda each: each.time.total):
        best.setdefault(str(each.layout), each)
    return Best([*best.values()][:_SHOWN], checked, refused, cut)


def _attention_check(run: Run, target: "Target") -> Callable[[int, int], bool]:
    """The function that says whether so many tensor and context ranks of ``target`` can compute attention."""
    from mca_models.megatron.factory.transformer_config import transformer_config

    dtype = training_dtype(run.model, run.settings.training)

    @cache
    def attends(tp: int, cp: int) -> bool:
        layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
        args = with_changes(run.settings.training, {"sequence_parallel": tp > 1})
        try:
            transformer_config(run.model, args, layout, dtype, target)
        except McaError:
            return cp == 1  # then something else is wrong, which `check` names
        return True

    return attends


def without_layout(values: Values) -> Values:
    """What a search keeps of a run."""
    return {name: value for name, value in values.items() if name not in LAYOUT_KEYS}


def with_one_rank(values: Values) -> Values:
    """The same with a layout of one rank, which is not what leaving it out means for an MCA checkpoint."""
    return {**without_layout(values), **dict.fromkeys(SIZE_FIELDS.values(), 1)}


def samples_per_step(settings: Settings, model: McaModelConfig, gpus: int) -> int:
    """Samples of a step as the configuration and ``model`` have them, on ``gpus`` ranks."""
    training = settings.training
    replica = resolve_layout(training, model).model_parallel_size
    once: int = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return once * max(gpus // replica, 1)


def _problems(
    task: "Task", values: Values, changes: JsonObject, gpus: int, target: "Target"
) -> tuple[str, ...]:
    try:
        settings = make_settings(task, {**without_layout(values), **changes}, "--search")
    except McaError as error:
        return tuple(list_problems(error))
    return check(task, settings, lambda *_: gpus, target).impossible


def render(best: Best, batch: int, gpus: int, hardware: Hardware) -> str:
    """The layouts as text."""
    device, found = hardware.device, best.layouts
    lines = [
        f"search       {gpus} x {device.name}, {counted(batch, 'sample')} a step, {device.usable_gib:.1f} GiB usable",
        "",
    ]
    if not found:
        lines += _explain_no_layout(best)
    for number, one in enumerate(found, 1):
        lines += [
            f"{number}. {one.layout}: {one.time.total:.2f} s a step, {one.speed:,.0f} tokens/s and device",
            f"   {_reason(one, found[0], device.usable_gib)}",
            *(f"     {line}" for line in yaml.safe_dump(one.changes, sort_keys=False).splitlines()),
            "",
        ]
    lines.append("predicted from the efficiencies in plan/hardware.toml; use it to compare layouts")
    return "\n".join(lines) + "\n"


def _explain_no_layout(best: Best) -> list[str]:
    if not best.checked:
        return ["no layout fits; take more devices, a smaller seq_length, or optimizer_cpu_offload: true"]
    which = f"the {best.checked} fastest" if best.cut else f"all {best.checked}"
    told = [f"layouts fit, but {which} are refused:"]
    told += [f"  - {problem} ({count} of them)" for problem, count in best.refused.most_common(_SHOWN)]
    if (left := len(best.refused) - _SHOWN) > 0:
        told.append(f"  - and for {counted(left, 'other reason')}")
    return told


def _reason(one: TimedLayout, best: TimedLayout, usable: float) -> str:
    time, total = one.time, one.time.total
    parts = {
        "computing": time.passes - time.of_messages,
        "messages within layers": time.of_messages,
        "waiting in the pipeline": time.waiting,
        "forward passes of a reference": time.beside,
        "gradients and weights": time.gradients,
        "optimizer": time.optimizer,
    }
    told = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds > 0.005 * total
    )
    slower = "" if one is best else f"; {total / best.time.total - 1:.0%} slower than the first"
    return f"{told}; {one.needs / GIB:.1f} of {usable:.1f} GiB{slower}"


def document(best: Best, batch: int, gpus: int, hardware: Hardware) -> JsonObject:
    """The layouts as a JSON object: ``mca-train/search``, version 1; sizes in bytes, times in seconds."""

    def told(one: TimedLayout) -> JsonObject:
        return {
            "changes": one.changes,
            "layout_sizes": {short: getattr(one.layout, short) for short in SIZE_FIELDS},
            "time": asdict(one.time),
            "tokens_per_second_and_device": one.speed,
            "bytes": one.needs,
        }

    return {
        "schema": SCHEMA,
        "version": VERSION,
        "gpus": gpus,
        "samples_per_step": batch,
        "device": asdict(hardware.device),
        "efficiency": asdict(hardware.efficiency),
        "layouts": [told(one) for one in best.layouts],
        "checked": best.checked,
        "refused": [{"problem": problem, "layouts": count} for problem, count in best.refused.most_common()],
    }
