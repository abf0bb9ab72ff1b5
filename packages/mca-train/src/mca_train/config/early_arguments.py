"""Training arguments before torch and transformers are imported, with the fields that transformers' source declares.

The source is also enough to check ``report_to`` and the learning-rate schedule. A source of another form reports
nothing; `mca_config.TrainingArguments` and `lr_schedule` check again. Packages of the optimizer and the layers are
looked up, not imported.
"""

import __future__

import ast
import contextlib
import dataclasses
import inspect
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mca_config.arguments import transformer_engine_options
from mca_config.fields import alternatives, is_enum
from mca_config.training_checks import CheckedArguments, is_supported_optimizer, report_problems
from mca_config.types import HfArguments, Typed

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_CLASS, _WORDS, _OPTIMIZERS = "TrainingArguments", "ExplicitEnum", "OptimizerNames"
_FILES = ("debug_utils.py", "trainer_utils.py", "training_args.py")


class Choice(str, Enum):  # noqa: UP042  (as transformers.utils.ExplicitEnum)
    """Base of the enumerations, whose members equal their values."""


@cache
def hf_fields(*, all_optimizers: bool = True) -> type:
    """Return a dataclass with the fields of Hugging Face's ``TrainingArguments``: names, types, defaults, help texts.

    They are read from the source of the installed transformers, with the enumerations of their choices: its import
    takes seconds, ``--help`` 0.2 s. If the source cannot be read in this way, return the class itself.

    Args:
        all_optimizers: False: among the choices of ``optim`` are only those that Megatron has.
    """
    try:
        return read_hf_fields(all_optimizers=all_optimizers)
    except Exception:  # the source of another version may differ in any way
        from mca_config.training import TrainingArguments

        return TrainingArguments


def read_hf_fields(*, all_optimizers: bool = True) -> type:
    """Return that dataclass from the source; any error means that the source is of another form."""
    classes = [
        node for name in _FILES for node in ast.parse(_source(name)).body if isinstance(node, ast.ClassDef)
    ]
    kept = [node for node in classes if node.name == _CLASS or _WORDS in map(ast.unparse, node.bases)]
    for node in kept:
        node.body = [each for part in node.body for each in _fields_and_constants(part)]
        node.decorator_list = []
        if node.name == _OPTIMIZERS:
            node.body = [
                part for part in node.body if all_optimizers or is_supported_optimizer(_constant(part))
            ]
    known = {_WORDS: Choice, "field": dataclasses.field, "Any": object, "Literal": typing.Literal}
    known |= {"ParallelismConfig": object, "trainer_log_levels": {}}
    exec(compile(ast.Module([*kept], []), _FILES[-1], "exec"), known)
    return dataclasses.dataclass(cast(type, known[_CLASS]))


def _fields_and_constants(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the fields and constants of a class; all values of a constant that depends on the machine."""
    if isinstance(node, ast.AnnAssign):
        yield node
    elif isinstance(node, ast.Assign | ast.If):
        inner = (each for each in ast.walk(node) if isinstance(each, ast.Assign))
        yield from (each for each in inner if isinstance(each.value, ast.Constant))


def _constant(node: ast.stmt) -> str:
    """Return the value of an enumeration's member."""
    return (
        str(node.value.value) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else ""
    )


@cache
def early_arguments() -> type:
    """Return a class with the fields of `mca_config.TrainingArguments` and its checks that need no import of torch.

    Hugging Face's own checks are missing.
    """
    read = hf_fields()
    if issubclass(read, CheckedArguments):
        return read  # the source of this transformers has another form; the class itself is imported
    enumerations = {
        name: kind
        for name, hint in typing.get_type_hints(read).items()
        for kind in alternatives(hint)
        if is_enum(kind)
    }

    @dataclasses.dataclass(kw_only=True)
    class EarlyArguments(CheckedArguments, read):  # type: ignore[misc, valid-type]
        """Arguments with the values that Hugging Face's set-up would give them, as far as rules read these."""

        def _problems(self) -> list[str]:
            args: HfArguments = self
            return [*super()._problems(), *integration_problems(args), *schedule_key_problems(args)]

        def __post_init__(self) -> None:
            self.derive_settings()
            super().__post_init__()
            for name, kind in enumerations.items():
                if isinstance(value := getattr(self, name), str):
                    setattr(self, name, kind(value))
            args: HfArguments = self
            args.output_dir = str(Path(args.output_dir or "").expanduser())
            args.do_eval = args.do_eval or args.eval_strategy != "no"

    return EarlyArguments


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
_BY_METRIC = {
    "REDUCE_ON_PLATEAU": ("torch", "optim/lr_scheduler.py", "ReduceLROnPlateau"),
    "GREEDY": ("transformers", "optimization.py", "GreedyLR"),
}
"""Package, file and class of each schedule that follows the evaluation loss."""
_FROM_THE_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


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
    if not settings:
        return
    if not isinstance(settings, dict):
        yield f'lr_scheduler_kwargs is {settings!r}; expected a mapping, such as {{"num_cycles": 2}}'
        return
    if (function := _schedule_function(schedule)) is None:
        return
    known = [each for each in inspect.signature(function).parameters if each not in _FROM_THE_RUN]
    if unknown := [name for name in settings if name not in known]:
        advice = f"expected some of {', '.join(sorted(known))}" if known else "remove lr_scheduler_kwargs"
        name = getattr(schedule, "value", schedule)
        yield f"lr_scheduler_kwargs: lr_scheduler_type {name} has no {', '.join(unknown)}; {advice}"


def schedule_problem(name: str, settings: object, error: Exception) -> str:
    """Return the message of a schedule that cannot be built."""
    text = " ".join(str(error).split())
    if isinstance(error, _ScheduleError):
        return f"lr_scheduler_type {name} with lr_scheduler_kwargs {settings}: {text}"
    if not isinstance(error, ValueError) or text == "math domain error":
        text = f"the schedule cannot be computed ({text})"
    advice = "change lr_scheduler_kwargs, learning_rate or warmup_steps"
    return f"lr_scheduler_type {name} with lr_scheduler_kwargs {settings}: {text}; {advice}"


class _ScheduleError(ValueError):
    """Error of a setting, with the fix in its message."""


def check_schedule_settings(schedule: Callable[..., object], settings: Mapping[str, Typed]) -> None:
    """Check that the settings of a schedule are complete, and numbers where its function takes numbers.

    Raises:
        ValueError: A setting is missing or has a wrong type.
    """
    for name, parameter in inspect.signature(schedule).parameters.items():
        default = parameter.default
        if name in _FROM_THE_RUN or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name not in settings:
            if default is parameter.empty:
                raise _ScheduleError(f"{name} is missing; set {name} in lr_scheduler_kwargs")
        elif not isinstance(default, str):
            value = settings[name]
            if isinstance(value, str | dict) or (value is None and default is not None):
                raise _ScheduleError(
                    f"{name} is {value!r}; expected a number; set {name} in lr_scheduler_kwargs to a number"
                )


def check_rates(rate: Callable[[int], float], base: float, warmup: int, steps: int) -> None:
    """Compute the rates of some steps: the first, that after the warm-up, the last, and steps between them.

    Args:
        rate: Function of a schedule that returns the factor of a step.
        base: Highest rate.
        warmup: Steps of the warm-up.
        steps: Steps of the run, after which the schedule advances once more.

    Raises:
        ValueError: A rate is not finite; transformers raises other errors.
    """
    between = range(0, steps, max(steps // SCHEDULE_STEPS, 1))
    for step in sorted({*between, min(warmup, steps), max(steps - 1, 0), steps}):
        value = base * rate(step)
        if not math.isfinite(value):
            raise ValueError(f"the rate of step {step} is {value}")


def checked_steps(args: HfArguments) -> int:
    """Return the steps of a schedule that is built as a check; unknown ones are more than those of the warm-up."""
    if args.max_steps > 0:
        return int(args.max_steps)
    warmup = args.warmup_steps
    return max(SCHEDULE_STEPS, 2 * int(warmup) if warmup >= 1 else math.ceil(2 / (1 - warmup)))


def schedule_value_problems(args: HfArguments) -> Iterator[str]:
    """Build the schedule as a check, as `lr_schedule.schedule_problems` does, but without torch."""
    settings, schedule = args.lr_scheduler_kwargs or {}, args.lr_scheduler_type
    if not isinstance(settings, dict):
        return
    if (function := _schedule_function(schedule)) is None:
        return
    steps, base, warmup = checked_steps(args), float(args.learning_rate), args.warmup_steps
    warmup = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    given = {"optimizer": _Carrier(base), "num_warmup_steps": warmup, "num_training_steps": steps}
    known = inspect.signature(function).parameters
    given = {name: value for name, value in given.items() if name in known}
    try:
        check_schedule_settings(function, settings)
        with warnings.catch_warnings(action="ignore"):
            made = function(**given, **settings)
        if callable(made):  # a schedule that follows a metric is an object
            check_rates(made, base, warmup, steps)
    except NameError:
        return  # the source needs more than the tables of schedules provide
    except SCHEDULE_ERRORS as error:
        yield schedule_problem(str(getattr(schedule, "value", schedule)), settings, error)


class _Carrier:
    """Optimizer of a schedule that is built as a check.

    Args:
        rate: Learning rate.
    """

    def __init__(self, rate: float) -> None:
        self.defaults = {"lr": rate}
        self.param_groups = [dict(self.defaults)]


def _schedule_rate(
    optimizer: _Carrier, function: Callable[[int], float], last_epoch: int = -1
) -> Callable[[int], float]:
    """Return the function of the rates, in place of torch's ``LambdaLR``."""
    return function


def _schedule_function(schedule: Enum | str) -> Callable[..., object] | None:
    """Return the function of a schedule that takes settings, or its class if it follows a metric."""
    member = schedule.name if isinstance(schedule, Enum) else schedule.upper()
    return schedule_functions().get(member) or metric_schedule(member)


@cache
def schedule_functions() -> dict[str, Callable[..., object]]:
    """Return the function of each schedule that takes settings, from the source; it returns the function of rates."""
    nodes = ast.parse(_source("optimization.py")).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    tables = (
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPE_TO_SCHEDULER_FUNCTION"
    )
    table = next(tables, None)
    if not isinstance(table, ast.Dict):
        return {}
    names: dict[str, object] = {"math": math, "partial": partial, "warnings": warnings}
    names["LambdaLR"] = _schedule_rate
    executed = _executed(functions.values(), "optimization.py", names)
    found: dict[str, Callable[..., object]] = {}
    for schedule, value in zip(table.keys, table.values, strict=True):
        name = "" if schedule is None else ast.unparse(schedule).removeprefix("SchedulerType.")
        node, function = functions.get(ast.unparse(value)), executed.get(ast.unparse(value))
        takes_settings = node is not None and node.args.kwarg is None and name not in _WITHOUT_SETTINGS
        if takes_settings and callable(function):
            found[name] = function
    return found


def _executed(nodes: Iterable[ast.stmt], file: str, names: dict[str, object]) -> dict[str, object]:
    """Execute ``nodes`` of ``file`` and return the names that they see and define."""
    code = compile(ast.Module([*nodes], []), file, "exec", __future__.annotations.compiler_flag)
    with contextlib.suppress(Exception):  # the source of another version may differ in any way
        exec(code, names)
    return names


def metric_schedule(member: str) -> type | None:
    """Return the class of a schedule that follows a metric, or None; parsing torch's and transformers' takes 25 ms."""
    return metric_schedules().get(member) if member in _BY_METRIC else None


@cache
def metric_schedules() -> dict[str, type]:
    """Return the classes of schedules that follow a metric, from the source; their constructors check values."""
    found = {}
    for schedule, (package, file, name) in _BY_METRIC.items():
        nodes = [
            node
            for node in ast.parse(_source(file, package)).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        for method in (each for node in nodes for each in node.body if isinstance(each, ast.FunctionDef)):
            method.decorator_list = []
        names: dict[str, object] = {
            "Optimizer": _Carrier,
            "LRScheduler": object,
            "inf": math.inf,
            "_param_groups_val_list": lambda optimizer, key: [group[key] for group in optimizer.param_groups],
        }
        if isinstance(kind := _executed(nodes, file, names).get(name), type):
            found[schedule] = kind
    return found


def _source(name: str, package: str = "transformers") -> str:
    found = find_spec(package)
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


_MEGATRON_WITH_MUON = (0, 19)


def optimizer_problems(args: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each requirement of Megatron's optimizer that this installation lacks."""
    precise = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if precise and find_spec("transformer_engine") is None:
        yield (
            "use_precision_aware_optimizer needs Transformer Engine's Adam, which is not installed, or "
            "optimizer_cpu_offload; remove it"
        )
    if args.optimizer == "muon":
        if tuple(map(int, version("megatron-core").split(".")[:2])) < _MEGATRON_WITH_MUON:
            yield (
                "optimizer muon needs megatron-core 0.19 or later (earlier ones cannot build it, or split queries, "
                "keys and values by other heads than the layer's) and Python 3.12; install them, or use adam or sgd"
            )
        elif find_spec("emerging_optimizers") is None:
            yield (
                "optimizer muon needs emerging-optimizers, which needs Python 3.12; install mca-train[muon] there, "
                "or use adam or sgd"
            )


def engine_problems(args: "TrainingArguments") -> Iterator[str]:
    """Yield an error for options of Transformer Engine's layers if it is not installed."""
    if args.transformer_impl == "local" or find_spec("transformer_engine") is not None:
        return
    options = transformer_engine_options(args.transformer_config_overrides())
    if args.transformer_impl == "transformer_engine":
        options.insert(0, "transformer_impl transformer_engine")
    if options:
        keys = ", ".join(option.split()[0] for option in options)
        yield (
            f"{', '.join(options)}: needs Transformer Engine, which is not installed; install mca-models[te] on a "
            f"machine with a GPU, or remove {keys}"
        )
