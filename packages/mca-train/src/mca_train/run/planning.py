"""``mca-train plan`` prints what is wrong with a run and what it needs.

Nothing is trained, and no weight and no row is read.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.checks import positions_exceeded
from mca_train.config.model import model_config, planned_ranks
from mca_train.config.run_config import Settings, given_values
from mca_train.plan.memory import Plan, make_plan
from mca_train.plan.report import render
from mca_train.run.checks import Run, check, settings_of
from mca_train.tasks.table import task_of
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.lora.config import AdapterConfig


def print_plan(task: Task | None, config: Path, overrides: list[str]) -> int:
    """Prints the plan of a configuration file; 2 if the run is impossible.

    Args:
        task: The kind of run; None: the one whose keys are given.
        config: The YAML file.
        overrides: ``--key value`` words.
    """
    values, where = given_values(config, overrides)
    task = task or task_of(values)
    settings = settings_of(task, values, where)
    findings = check(task, settings, planned_ranks)
    if findings.impossible or findings.run is None:
        sys.stdout.write("".join(["this run is impossible:\n", *(f"  - {p}\n" for p in findings.impossible)]))
        return 2
    sys.stdout.write(render(_plan(findings.run), settings, findings.run.model))
    if told := positions_exceeded(findings.run.model, settings.data.seq_length):
        sys.stdout.write(f"seq_length {settings.data.seq_length}: {told}\n")
    if findings.missing:
        sys.stdout.write("".join(["missing to begin here:\n", *(f"  - {p}\n" for p in findings.missing)]))
    return 0


def _plan(run: Run) -> Plan:
    settings, reference = run.settings, run.task.reference(run.settings)
    return make_plan(
        run.model,
        settings.training,
        settings.data.seq_length,
        run.world_size,
        adapter=_adapter(settings),
        reference=None if reference is None else model_config(reference),
    )


def _adapter(settings: Settings) -> "AdapterConfig | None":
    from mca_models.lora.config import AdapterConfig

    if settings.lora.adapter_name_or_path is not None:
        return AdapterConfig.load(Path(settings.lora.adapter_name_or_path))
    return AdapterConfig.from_dict(settings.lora.config()) if settings.lora.wanted else None
