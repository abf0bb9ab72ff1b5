"""Checks of ``report_to`` and ``lr_scheduler_kwargs`` by the source of transformers, whose import takes seconds.

A source of another form reports nothing; `mca_config.TrainingArguments` and `lr_schedule` check again.
"""

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mca_config.training_checks import report_problems
from mca_config.types import HfArguments

_PACKAGES = {"azure_ml": ("azureml",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Packages of which one must be installed, for names that differ from their package."""
_BY_ENVIRONMENT = ("kubeflow",)
"""Names that need environment variables instead of a package."""
_TABLE = re.compile(r"^INTEGRATION_TO_CALLBACK = \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_WITHOUT_SETTINGS = ("CONSTANT", "CONSTANT_WITH_WARMUP")
"""Schedules that ignore ``lr_scheduler_kwargs``."""
_FROM_THE_RUN = ("optimizer", "num_warmup_steps", "num_training_steps")


def integration_problems(args: HfArguments) -> Iterator[str]:
    """Yield an error for each entry of ``report_to`` that is unknown, or whose package is not installed."""
    if names := known_integrations():
        yield from report_problems(args.report_to, names, is_installed)


def known_integrations() -> tuple[str, ...]:
    """Return the names that transformers knows; empty: its source has another form."""
    found = _TABLE.search(_source("integrations/integration_utils.py"))
    return tuple(re.findall(r'^    "(\w+)":', found[1], re.MULTILINE)) if found else ()


def is_installed(name: str) -> bool:
    """Return True if the package of an integration is installed."""
    packages = _PACKAGES.get(name, (name,))
    return name in _BY_ENVIRONMENT or any(find_spec(package) is not None for package in packages)


def schedule_key_problems(args: HfArguments) -> Iterator[str]:
    """Yield an error for ``lr_scheduler_kwargs`` that are no mapping, or that the schedule does not have."""
    settings, schedule = args.lr_scheduler_kwargs, args.lr_scheduler_type
    if isinstance(settings, str):
        with contextlib.suppress(ValueError):
            settings = json.loads(settings)
    if not settings:
        return
    if not isinstance(settings, dict):
        yield f'lr_scheduler_kwargs is {settings!r}; expected a mapping, such as {{"num_cycles": 2}}'
        return
    known = schedule_parameters().get(schedule.name if isinstance(schedule, Enum) else schedule.upper())
    unknown = [name for name in settings if known is not None and name not in known]
    if known is not None and unknown:
        advice = f"expected some of {', '.join(sorted(known))}" if known else "remove lr_scheduler_kwargs"
        name = getattr(schedule, "value", schedule)
        yield f"lr_scheduler_kwargs: lr_scheduler_type {name} has no {', '.join(unknown)}; {advice}"


@cache
def schedule_parameters() -> dict[str, tuple[str, ...]]:
    """Return the parameters of each schedule, by the name of its member of ``SchedulerType``."""
    nodes = ast.parse(_source("optimization.py")).body
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
    tables = (
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPE_TO_SCHEDULER_FUNCTION"
    )
    table = next(tables, None)
    if not isinstance(table, ast.Dict):
        return {}
    found = {}
    for schedule, function in zip(table.keys, table.values, strict=True):
        name = "" if schedule is None else ast.unparse(schedule).removeprefix("SchedulerType.")
        known = functions.get(ast.unparse(function))
        if known is not None and known.kwarg is None and name not in _WITHOUT_SETTINGS:
            names = (each.arg for each in (*known.args, *known.kwonlyargs))
            found[name] = tuple(each for each in names if each not in (*_FROM_THE_RUN, "last_epoch"))
    return found


def _source(name: str) -> str:
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
