"""Checks of ``report_to`` and of the learning-rate schedule by the source of transformers, whose import takes seconds.

A source of another form reports nothing; `mca_config.TrainingArguments` and `lr_schedule` check again.
"""

import __future__

import ast
import contextlib
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from mca_config.training_checks import report_problems
from mca_config.types import HfArguments

_PACKAGES = {"azure_ml": ("azureml",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Packages of which one must be installed, for names that differ from their package."""
_BY_ENVIRONMENT = ("kubeflow",)
"""Names that need environment variables instead of a package."""
_TABLE = re.compile(r"^INTEGRATION_TO_CALLBACK = \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_WITHOUT_SETTINGS = ("CONSTANT", "CONSTANT_WITH_WARMUP")
"""Schedules that ignore ``lr_scheduler_kwargs``."""
SCHEDULE_STEPS = 1000
"""Steps of a schedule that is built only as a check."""
SCHEDULE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)
"""Errors of transformers about the values of a schedule."""
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
    settings, schedule = _schedule_settings(args), args.lr_scheduler_type
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


def _schedule_settings(args: HfArguments) -> object:
    """Return ``lr_scheduler_kwargs``, read from JSON if it is text that can be read."""
    settings: object = args.lr_scheduler_kwargs
    if isinstance(settings, str):
        with contextlib.suppress(ValueError):
            settings = json.loads(settings)
    return settings


def schedule_problem(name: str, settings: object, error: Exception) -> str:
    """Return the message of a schedule that cannot be built."""
    return f"lr_scheduler_type {name} with lr_scheduler_kwargs {settings}: {' '.join(str(error).split())}"


def schedule_value_problems(args: HfArguments) -> Iterator[str]:
    """Build the schedule as a check, as `lr_schedule.schedule_problems` does, but without torch."""
    settings, schedule = _schedule_settings(args) or {}, args.lr_scheduler_type
    function = _schedule_functions().get(schedule.name if isinstance(schedule, Enum) else schedule.upper())
    if function is None or not isinstance(settings, dict):
        return
    steps = args.max_steps if args.max_steps > 0 else SCHEDULE_STEPS
    warmup = args.warmup_steps
    given = {
        "optimizer": _Carrier(float(args.learning_rate)),
        "num_warmup_steps": int(warmup) if warmup >= 1 else math.ceil(steps * warmup),
        "num_training_steps": steps,
    }
    known = inspect.signature(function).parameters
    try:
        function(**{name: value for name, value in given.items() if name in known}, **settings)
    except NameError:
        return  # the source needs more than `_schedule_functions` provides
    except SCHEDULE_ERRORS as error:
        yield schedule_problem(str(getattr(schedule, "value", schedule)), settings, error)


class _Carrier:
    """Optimizer of a schedule that is built as a check.

    Args:
        rate: Learning rate.
    """

    def __init__(self, rate: float) -> None:
        self.defaults = {"lr": rate}


def _first_rate(optimizer: _Carrier, function: Callable[[int], float], last_epoch: int = -1) -> float:
    """Return the first rate, which torch's ``LambdaLR`` computes when it is built."""
    return optimizer.defaults["lr"] * function(last_epoch + 1)


@cache
def _schedule_functions() -> dict[str, Callable[..., object]]:
    """Return the functions of `schedule_parameters`, from the source, with the first rate in place of a schedule."""
    nodes, known = _schedule_nodes()
    if not known:
        return {}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    names: dict[str, object] = {
        "math": math,
        "partial": partial,
        "warnings": warnings,
        "LambdaLR": _first_rate,
    }
    code = compile(
        ast.Module([*functions], []), "optimization.py", "exec", __future__.annotations.compiler_flag
    )
    try:
        exec(code, names)
    except Exception:  # the source of another version may differ in any way
        return {}
    return {schedule: cast("Callable[..., object]", names[node.name]) for schedule, node in known.items()}


@cache
def schedule_parameters() -> dict[str, tuple[str, ...]]:
    """Return the parameters of each schedule, by the name of its member of ``SchedulerType``."""
    found = {}
    for schedule, function in _schedule_nodes()[1].items():
        names = (each.arg for each in (*function.args.args, *function.args.kwonlyargs))
        found[schedule] = tuple(each for each in names if each not in (*_FROM_THE_RUN, "last_epoch"))
    return found


@cache
def _schedule_nodes() -> tuple[list[ast.stmt], dict[str, ast.FunctionDef]]:
    """Return the statements of the source, and the function of each schedule that takes settings."""
    nodes = ast.parse(_source("optimization.py")).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    tables = (
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPE_TO_SCHEDULER_FUNCTION"
    )
    table = next(tables, None)
    if not isinstance(table, ast.Dict):
        return nodes, {}
    found = {}
    for schedule, function in zip(table.keys, table.values, strict=True):
        name = "" if schedule is None else ast.unparse(schedule).removeprefix("SchedulerType.")
        known = functions.get(ast.unparse(function))
        if known is not None and known.args.kwarg is None and name not in _WITHOUT_SETTINGS:
            found[name] = known
    return nodes, found


def _source(name: str) -> str:
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
