"""``mca-train plan --search``: the layouts that fit a number of devices, by predicted speed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from time import process_time
from typing import TYPE_CHECKING

import yaml

from mca_config.errors import McaError, list_problems
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_config.model_config import training_dtype
from mca_config.printable import counted
from mca_config.types import JsonObject, Values
from mca_models.megatron.factory.transformer_config import Target, transformer_config
from mca_train.plan.hardware import Hardware
from mca_train.plan.memory import GIB, PlanInput
from mca_train.plan.search import LAYOUT_KEYS, Fit, TimedLayout, fitting_layouts, with_changes, with_step_time
from mca_train.run.rules import Run, check
from mca_train.run.settings import make_settings

if TYPE_CHECKING:
    from mca_train.tasks.task import Task

SCHEMA, VERSION = "mca-train/search", 1
_SHOWN = 5
_COMPARED = 40
"""Number of layouts that pass the check and whose steps are predicted in full."""
_TIGHT = 0.95
"""Share of the usable memory above which a layout is marked, because the plan is a prediction."""
_SECONDS = 10.0
"""Processor seconds after which at most `_COMPARED` layouts are checked."""


@dataclass(frozen=True)
class Best:
    """Result of a search.

    Args:
        layouts: The fastest layouts that pass the check of runs, with one entry each.
        checked: Number of checked layouts that fit the memory.
        refused: Problems of checked layouts, with their counts.
        cut: The time limit ended the search before all layouts were checked.
    """

    layouts: list[TimedLayout]
    checked: int
    refused: Counter[str]
    cut: bool


def best_layouts(
    task: "Task",
    values: Values,
    run: Run,
    plan_input: PlanInput,
    batch: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool],
) -> Best:
    """Check the layouts that fit, the fastest first, until enough have passed.

    Args:
        task: The kind of run.
        values: Its keys and values.
        run: The run, without a layout.
        plan_input: Input of the plan.
        batch: Samples of a step.
        hardware: Hardware of the ranks.
        allowed: Returns whether the run supports a layout.
    """
    gpus, target = run.world_size, Target.planned(plan_input.implementation)
    attends, began = _attention_check(run, target), process_time()

    def is_supported(layout: ParallelLayout) -> bool:
        return attends(layout.tp, layout.cp) and allowed(layout)

    unset = dict.fromkeys(name for name in values if name in LAYOUT_KEYS)  # layout keys of the configuration
    passing: list[Fit] = []
    refused, checked, cut = Counter[str](), 0, False
    for fit in fitting_layouts(plan_input, run.settings.training, batch, gpus, hardware, is_supported):
        cut = checked >= _COMPARED and process_time() - began > _SECONDS
        if cut or len(passing) == _COMPARED:
            break
        one = replace(fit, changes=unset | fit.changes)
        problems = _problems(task, values, one.changes, run, target)
        checked += 1
        refused.update(problems)
        passing += [] if problems else [one]
    best: dict[str, TimedLayout] = {}
    found = (with_step_time(plan_input, one, gpus, hardware) for one in passing)
    for each in sorted(found, key=lambda each: each.time.total):
        best.setdefault(str(each.layout), each)
    return Best(_varied([*best.values()]), checked, refused, cut)


def _varied(layouts: list[TimedLayout]) -> list[TimedLayout]:
    """Return the layouts to show of ``layouts``, the fastest first: those that differ in vpp alone only to fill up."""
    chosen: dict[tuple[int, ...], TimedLayout] = {}
    for each in layouts:
        layout = each.layout
        chosen.setdefault((layout.tp, layout.pp, layout.cp, layout.ep, layout.etp), each)
    shown = [*chosen.values()][:_SHOWN]
    shown += [each for each in layouts if each not in shown][: _SHOWN - len(shown)]
    return sorted(shown, key=lambda each: each.time.total)


def _attention_check(run: Run, target: "Target") -> Callable[[int, int], bool]:
    """Return a function that checks whether attention supports a tensor- and context-parallel size on ``target``."""
    dtype = training_dtype(run.model, run.settings.training)

    @cache
    def attends(tp: int, cp: int) -> bool:
        layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
        args = with_changes(run.settings.training, {"sequence_parallel": tp > 1})
        try:
            transformer_config(run.model, args, layout, dtype, target)
        except McaError:
            return cp == 1  # another problem, which `check` reports
        return True

    return attends


def without_layout(values: Values) -> Values:
    """Return ``values`` without the keys that a search sets."""
    return {name: value for name, value in values.items() if name not in LAYOUT_KEYS}


def with_one_rank(values: Values) -> Values:
    """Return ``values`` with all parallel sizes 1, because unset sizes mean those of an MCA checkpoint."""
    return {**without_layout(values), **dict.fromkeys(SIZE_FIELDS.values(), 1)}


def _problems(
    task: "Task", values: Values, changes: JsonObject, run: Run, target: "Target"
) -> tuple[str, ...]:
    try:
        settings = make_settings(task, {**without_layout(values), **changes}, "--search")
    except McaError as error:
        return tuple(list_problems(error))
    return check(task, settings, lambda *_: run.world_size, target, machine=False, searched=run).impossible


def render(best: Best, batch: str, gpus: int, hardware: Hardware, shortage: str | None) -> str:
    """Return the layouts as text.

    Args:
        best: The layouts.
        batch: The global batch in words.
        gpus: Number of devices.
        hardware: Device and its efficiencies.
        shortage: The message about a search without any layout that fits.
    """
    device, found = hardware.device, best.layouts
    lines = [
        f"search       {gpus} x {device.name}, global batch {batch}, {device.usable_gib:.1f} GiB usable",
        "",
    ]
    if not found:
        return "\n".join([*lines, *([shortage] if shortage else _refusals(best))]) + "\n"
    for number, one in enumerate(found, 1):
        lines += [
            f"{number}. {one.layout}: {one.time.total:.2f} s a step, {one.speed:,.0f} tokens/s and device",
            f"   {_reason(one, found[0], device.usable_gib)}",
            *(f"     {line}" for line in yaml.safe_dump(one.changes, sort_keys=False).splitlines()),
            "",
        ]
    lines += [
        "predicted from the efficiencies in plan/hardware.toml, without the optimizer's copies to and from the host",
        "(optimizer_cpu_offload); use it to compare layouts",
    ]
    return "\n".join(lines) + "\n"


def _refusals(best: Best) -> list[str]:
    which = f"the {best.checked} fastest" if best.cut else f"all {best.checked}"
    lines = [f"layouts fit, but {which} have problems:"]
    lines += [f"  - {problem} ({count} of them)" for problem, count in best.refused.most_common(_SHOWN)]
    if (left := len(best.refused) - _SHOWN) > 0:
        lines.append(f"  - and {counted(left, 'other problem')}")
    return lines


def _reason(one: TimedLayout, best: TimedLayout, usable: float) -> str:
    time, total = one.time, one.time.total
    parts = {
        "computing": time.passes - time.of_messages,
        "messages within layers": time.of_messages,
        "waiting in the pipeline": time.waiting,
        "forward passes of a reference": time.extra_forward,
        "gradients and weights": time.gradients,
        "optimizer": time.optimizer,
    }
    shares = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds > 0.005 * total
    )
    slower = "" if one is best else f"; {total / best.time.total - 1:.0%} slower than the first"
    tight = " (tight)" if one.needs > _TIGHT * usable * GIB else ""
    return f"{shares}; {one.needs / GIB:.1f} of {usable:.1f} GiB{tight}{slower}"


def document(best: Best, batch: int, gpus: int, hardware: Hardware, shortage: str | None) -> JsonObject:
    """Return the layouts as a JSON object: ``mca-train/search``, version 1; sizes in bytes, times in seconds.

    ``shortage`` is the message about a search without any layout that fits, as for `render`.
    """

    def layout_entry(one: TimedLayout) -> JsonObject:
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
        "layouts": [layout_entry(one) for one in best.layouts],
        "shortage": shortage,
        "checked": best.checked,
        "refused": [{"problem": problem, "layouts": count} for problem, count in best.refused.most_common()],
    }
