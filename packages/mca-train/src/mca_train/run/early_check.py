"""Checks of a configuration before torch and transformers are imported, which takes 5 to 10 seconds.

They find wrong keys and values, missing files and columns, a model that does not fit the layout, and unknown LoRA
modules. `rules.check` repeats them with those that need an import; the columns are checked again with the rows.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.redaction import redacted
from mca_config.types import Values
from mca_train.config.model import model_config, resolve_layout, trained_model
from mca_train.config.run_config import Settings, has_hub_ids
from mca_train.plan.options import PlanOptions
from mca_train.run.adapter_rules import adapter_problems
from mca_train.run.early_columns import column_problems
from mca_train.run.file_rules import FILE_RULES, data_files, directories, start
from mca_train.run.key_rules import KEY_RULES
from mca_train.run.settings import make_settings
from mca_train.tasks.table import TASKS, infer_task
from mca_train.tasks.task import Task

TEXT_PARTS = ("language",)
"""Parts of a model without media."""


def check_run(task: Task, values: Values, where: str, *, launched: bool = False) -> None:
    """Check the keys, the files and the architecture of a run.

    Args:
        task: The kind of run.
        values: Keys and values of the configuration.
        where: Their origin for error messages.
        launched: torchrun or another launcher started this rank, perhaps again: the ranks decide together from which
            checkpoint they start.

    Raises:
        UsageError: All problems.
    """
    settings = make_settings(task, values, where, early=True)
    problems = [problem for rule in KEY_RULES for problem in rule(task, settings)]
    is_local = not has_hub_ids(values)
    ranks = int(os.environ["WORLD_SIZE"]) if launched else None
    skipped = [*([] if is_local else [directories]), *([start] if launched else [])]
    if is_local:
        problems += _layout_problems(task, settings, ranks=ranks)
    problems += [problem for rule in FILE_RULES if rule not in skipped for problem in rule(task, settings)]
    problems += column_problems(task, settings.data)
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
    _raise(_data_problems(task, values, where), where)


def check_tokenize(values: Values, where: str) -> None:
    """Check the keys and data files of ``mca-train tokenize``.

    Raises:
        UsageError: All problems.
    """
    values = {key: value for key, value in values.items() if key != "output_prefix"}
    _raise(_data_problems(TASKS["pretrain"], values, where), where)


def _data_problems(task: Task, values: Values, where: str) -> Iterator[str]:
    settings = make_settings(task, values, where, early=True)
    yield from data_files(task, settings)
    yield from column_problems(task, settings.data)


def _layout_problems(
    task: Task, settings: Settings, options: PlanOptions | None = None, ranks: int | None = None
) -> Iterator[str]:
    """Yield problems of reading the architecture, of dividing the model over the ranks, and of its adapter.

    A search sets the layout.
    """
    ranks = ranks or (options and options.gpus) or settings.launch.nproc_per_node
    try:
        stored = model_config(settings.data.model_name_or_path)
        model = trained_model(stored, task.head(settings), task.name)
        layout = resolve_layout(settings.training, model)
        problems = [] if options and options.search else check_layout(model, layout, ranks)
        yield from problems
        if (
            not problems and model.vision is None
        ):  # the parts of other models are named in modules that import torch
            new_head = model.head.num_labels is not None and stored.head.num_labels is None
            yield from adapter_problems(
                settings, replace(model, layout=layout), TEXT_PARTS, new_head=new_head
            )
    except McaError as error:
        yield from list_problems(error)


def _raise(problems: Iterable[str], where: str) -> None:
    raise_problems(dict.fromkeys(map(redacted, problems)), where, kind=UsageError)
