"""Checks of a configuration before torch and transformers are imported, which takes 5 to 10 seconds.

They find wrong keys and values, missing files, and a model that does not fit the layout. `rules.check` repeats them
with those that need an import.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.redaction import redacted
from mca_train.config.model import resolve_layout
from mca_train.config.run_config import Settings, has_hub_ids
from mca_train.plan.options import PlanOptions
from mca_train.run.architectures import read_architecture
from mca_train.run.file_rules import FILE_RULES, data_files, directories
from mca_train.run.key_rules import KEY_RULES
from mca_train.run.settings import load_values, make_settings
from mca_train.tasks.table import TASKS, infer_task
from mca_train.tasks.task import Task


def check_run(task: Task, config: Path | None, overrides: list[str]) -> None:
    """Check the keys, the files and the architecture of a run.

    Raises:
        UsageError: All problems.
    """
    values, where = load_values(config, overrides)
    settings = make_settings(task, values, where, early=True)
    problems = [problem for rule in KEY_RULES for problem in rule(task, settings)]
    skipped = [directories] if has_hub_ids(values) else []
    if not skipped:
        problems += _layout_problems(task, settings)
    problems += [problem for rule in FILE_RULES if rule not in skipped for problem in rule(task, settings)]
    _raise(problems, where)


def check_plan(task: Task | None, config: Path | None, overrides: list[str]) -> None:
    """Check the keys of a plan, which may name files that this machine does not have.

    Raises:
        UsageError: All problems.
    """
    values, where = load_values(config, overrides)
    flags = [flag.name for flag in fields(PlanOptions)]
    make_settings(task or infer_task(values), {"output_dir": "plan", **values}, where, flags, early=True)


def check_data(task: Task | None, config: Path | None, overrides: list[str]) -> None:
    """Check the keys and data files of a preview.

    Raises:
        UsageError: All problems.
    """
    values, where = load_values(config, overrides)
    task = task or infer_task(values)
    _raise(data_files(task, make_settings(task, values, where, early=True)), where)


def check_tokenize(config: Path | None, overrides: list[str]) -> None:
    """Check the keys and data files of ``mca-train tokenize``.

    Raises:
        UsageError: All problems.
    """
    values, where = load_values(config, overrides)
    values.pop("output_prefix", None)
    task = TASKS["pretrain"]
    _raise(data_files(task, make_settings(task, values, where, early=True)), where)


def _layout_problems(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of reading the architecture, or of dividing the model over the ranks."""
    try:
        _, model = read_architecture(task, settings)
        layout = resolve_layout(settings.training, model)
        yield from check_layout(model, layout, settings.launch.nproc_per_node)
    except McaError as error:
        yield from list_problems(error)


def _raise(problems: Iterable[str], where: str) -> None:
    raise_problems(dict.fromkeys(map(redacted, problems)), where, kind=UsageError)
