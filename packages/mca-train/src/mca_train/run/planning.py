"""``mca-train plan`` prints what is wrong with a run and what it needs.

Nothing is trained, and no weight and no row is read.
"""

import sys
from pathlib import Path

from mca_config.checks import positions_exceeded
from mca_train.config.model import adapter_config, model_config, planned_ranks
from mca_train.config.run_config import given_values
from mca_train.plan.memory import Plan, make_plan
from mca_train.plan.report import render
from mca_train.run.checks import Run, check, settings_of
from mca_train.run.hub_paths import with_directories
from mca_train.tasks.table import task_of
from mca_train.tasks.task import Task


def print_plan(task: Task | None, config: Path, overrides: list[str]) -> int:
    """Prints the plan of a configuration file; 2 if the run is impossible.

    Args:
        task: The kind of run; None: the one whose keys are given.
        config: The YAML file.
        overrides: ``--key value`` words, and the plan's own: ``--dry_run`` runs a step without memory and ranks.
    """
    dry, words = _own_flag(overrides)
    values, where = given_values(config, words)
    task = task or task_of(values)
    settings = settings_of(task, with_directories(values, config_only=True), where)
    findings = check(task, settings, planned_ranks)
    if findings.impossible or findings.run is None:
        sys.stdout.write("".join(["this run is impossible:\n", *(f"  - {p}\n" for p in findings.impossible)]))
        return 2
    sys.stdout.write(render(_plan(findings.run), settings, findings.run.model))
    if dry:
        sys.stdout.write(_dry_run(findings.run))
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
        adapter=adapter_config(settings.lora),
        reference=None if reference is None else model_config(reference),
    )


def _own_flag(words: list[str]) -> tuple[bool, list[str]]:
    """Whether ``--dry_run`` is among ``words``, and the others."""
    own = ("--dry_run", "--dry-run")
    return any(word in own for word in words), [word for word in words if word not in own]


def _dry_run(run: Run) -> str:
    from mca_train.dry_run.report import render_dry_run
    from mca_train.dry_run.stages import needs_of_stages

    stages = needs_of_stages(run.task, run.settings, run.model, run.layout, run.world_size)
    return "\n" + render_dry_run(stages, run.settings.training.gradient_accumulation_steps)
