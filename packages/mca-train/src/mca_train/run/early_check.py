"""Checks of a configuration before torch and transformers are imported, which takes 5 to 10 seconds.

They find wrong keys and values, missing files, and a model that does not fit the layout. `rules.check` repeats them
with those that need an import.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields

from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.redaction import redacted
from mca_config.types import Values
from mca_train.config.model import model_config, resolve_layout, trained_model
from mca_train.config.run_config import Settings, has_hub_ids
from mca_train.plan.options import PlanOptions
from mca_train.run.file_rules import FILE_RULES, data_files, directories
from mca_train.run.key_rules import KEY_RULES
from mca_train.run.settings import make_settings
from mca_train.tasks.table import TASKS, infer_task
from mca_train.tasks.task import Task


def check_run(task: Task, values: Values, where: str) -> None:
    """Check the keys, the files and the architecture of a run.

    Raises:
        UsageError: All problems.
    """
    settings = make_settings(task, values, where, early=True)
    problems = [problem for rule in KEY_RULES for problem in rule(task, settings)]
    skipped = [directories] if has_hub_ids(values) else []
    if not skipped:
        problems += _layout_problems(task, settings)
    problems += [problem for rule in FILE_RULES if rule not in skipped for problem in rule(task, settings)]
    _raise(problems, where)


def plan_problems(task: Task | None, values: Values, where: str, options: PlanOptions) -> list[str]:
    """Return the problems of a plan, which may name data that this machine does not have.

    Raises:
        UsageError: Keys or values are wrong.
    """
    task, flags = task or infer_task(values), [flag.name for flag in fields(options)]
    settings = make_settings(task, {"output_dir": "plan", **values}, where, flags, early=True)
    problems = [problem for rule in KEY_RULES for problem in rule(task, settings)]
    if not has_hub_ids(values):
        problems += _layout_problems(task, settings, options)
    return list(dict.fromkeys(map(redacted, problems)))


def check_data(task: Task | None, values: Values, where: str) -> None:
    """Check the keys and data files of a preview.

    Raises:
        UsageError: All problems.
    """
    task = task or infer_task(values)
    _raise(data_files(task, make_settings(task, values, where, early=True)), where)


def check_tokenize(values: Values, where: str) -> None:
    """Check the keys and data files of ``mca-train tokenize``.

    Raises:
        UsageError: All problems.
    """
    values = {key: value for key, value in values.items() if key != "output_prefix"}
    task = TASKS["pretrain"]
    _raise(data_files(task, make_settings(task, values, where, early=True)), where)


def _layout_problems(task: Task, settings: Settings, options: PlanOptions | None = None) -> Iterator[str]:
    """Yield problems of reading the architecture, or of dividing the model over the ranks; a search sets the layout."""
    ranks = (options and options.gpus) or settings.launch.nproc_per_node
    try:
        stored = model_config(settings.data.model_name_or_path)
        model = trained_model(stored, task.head(settings), task.name)
        if options is None or not options.search:
            yield from check_layout(model, resolve_layout(settings.training, model), ranks)
    except McaError as error:
        yield from list_problems(error)


def _raise(problems: Iterable[str], where: str) -> None:
    raise_problems(dict.fromkeys(map(redacted, problems)), where, kind=UsageError)
