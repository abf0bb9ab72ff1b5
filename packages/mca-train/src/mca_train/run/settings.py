"""Reading of a run's configuration: the YAML file and the command line, as one `Settings`.

The checks here need neither torch nor transformers, whose imports take 5 to 10 seconds (`early_arguments` is the class
of the training arguments without them): they find wrong keys and values, missing files and columns, a model that does
not fit the layout, unknown LoRA modules, and parts that cannot be trained. `mca_train.run.rules.check` repeats them
with those that need an import. The columns are checked again with the rows.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from mca_config import yaml_text
from mca_config.arguments import float16_problems
from mca_config.checks import check_layout
from mca_config.errors import McaError, Origin, UsageError, list_problems, raise_problems
from mca_config.fields import build
from mca_config.model_config import training_dtype
from mca_config.printable import suggestion
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import LaunchArguments, LoraArguments
from mca_train.config.early_arguments import early_arguments, engine_problems, schedule_value_problems
from mca_train.config.model import (
    adapter_problems,
    model_config,
    resolve_layout,
    samples_per_step,
    trained_model,
)
from mca_train.config.model_parts import early_part_problems, trained_parts
from mca_train.config.renamed_options import RENAMED
from mca_train.config.run_config import Settings, has_hub_ids, with_directories
from mca_train.plan.options import PlanOptions
from mca_train.run.early_rules import (
    FILE_RULES,
    KEY_RULES,
    column_problems,
    data_files,
    directories,
    start,
    weights_problems,
)
from mca_train.tasks import TASKS, infer_task, other_task_keys
from mca_train.tasks.task import Task

_PLAN_FLAGS = {
    flag.name: f"is a flag of mca-train plan (--{flag.name}), no key of a run; remove it"
    for flag in fields(PlanOptions)
}


def load_values(config: Path | None, overrides: list[str]) -> tuple[JsonObject, str]:
    """Return the file's values, overridden by the command line's, and the `Origin` of the two."""
    words = parse_overrides(overrides)
    if config is None:
        return words, "the command line"
    where = Origin(f"{config}{' and the command line' if words else ''}")
    where.flags, values = frozenset(words), read_yaml(config)
    where.sources = {key: f"{config}: " for key in values if words} | {key: "--" for key in words}
    return values | words, where


def read_yaml(path: Path) -> JsonObject:
    """Return the mapping in ``path``.

    Raises:
        UsageError: The file is missing, cannot be read, is not YAML, or is not a mapping with string keys.
    """
    if path.is_dir():
        raise UsageError(f"configuration file {path} is a directory; name a YAML file")
    if not path.exists():
        raise UsageError(
            f"configuration file {path} does not exist; mca-train init KIND MODEL {path} writes one"
        )
    if not path.is_file():
        raise UsageError(
            f"configuration file {path} is a pipe or a device, but every rank reads it; name a file"
        )
    try:
        data = yaml_text.parse_fields(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path} must hold 'key: value' lines; its top level is {type(data).__name__}")
    return data


def parse_overrides(words: Sequence[str]) -> JsonObject:
    """Parse ``--key value``, ``--key=value``, ``--flag`` and ``--list a b`` to a mapping, with underscores for dashes.

    Raises:
        UsageError: A word is not part of any ``--key``.
    """
    found: dict[str, list[str]] = {}
    key = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            if key in found:
                raise UsageError(f"--{key} is given twice")
            found[key] = [value] if equals else []
        elif key is None:
            raise UsageError(f"unexpected argument '{word}'; overrides look like --key value")
        else:
            found[key].append(word)
    return {key: _scalar(values) for key, values in found.items()}


def _scalar(words: list[str]) -> object:
    if not words:
        return True
    values = [_read(word) for word in words]
    return values[0] if len(values) == 1 else values


def _read(word: str) -> object:
    """Parse ``word`` as YAML; return it unchanged if that fails (a path such as ``a: b`` or ``@x``)."""
    if ": " in word:
        return word
    try:
        return _mapping(word) if word.startswith("{") else yaml_text.parse_fields(word)
    except ValueError:
        return word


def _mapping(word: str) -> object:
    """Parse a mapping in braces, whose values have no declared type: ``1e-05``, as JSON writes it, is a number too."""
    found = yaml_text.parse(word)
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return found


def make_settings(
    task: Task, values: Values, where: str, flags: Iterable[str] = (), *, early: bool = False
) -> Settings:
    """Convert ``values`` to the arguments of ``task``.

    Args:
        task: The kind of run.
        values: Keys and values.
        where: Origin of the values for error messages.
        flags: Names of the command's flags that are not keys.
        early: Import neither torch nor transformers (`early_arguments`).

    Raises:
        UsageError: Keys or values are wrong.
    """
    elsewhere = {**RENAMED, **_PLAN_FLAGS, **other_task_keys(task)}

    def unknown(key: str, known: Iterable[str]) -> str:
        is_flag = isinstance(where, Origin) and key in where.flags
        if key in elsewhere:
            return f"{'--' if is_flag else ''}{key}: {elsewhere[key]}"
        names = [*(f"--{name}" if is_flag else name for name in known), *(f"--{flag}" for flag in flags)]
        shown = f"flag --{key}" if is_flag else f"key '{key}'"
        return f"unknown {shown}{suggestion(key, names, f'mca-train {task.name} --help lists the keys')}"

    classes: list[type] = [task.data_arguments, LaunchArguments, LoraArguments]
    training, data, launch, lora, *others = build(
        [_training_class(early=early), *classes, *([task.task_arguments] if task.task_arguments else [])],
        _without_backend(values) if early else _for_this_machine(values),
        where=where,
        unknown=unknown,
        only=["output_dir"],
    )
    return Settings(
        training=training,
        data=data,
        launch=launch,
        lora=lora,
        own=others[0] if others else None,
        values=values,
        where=where,
    )


def _for_this_machine(values: Values) -> JsonObject:
    """Return the keys and values for Hugging Face's arguments on this machine.

    The backend is removed, because Megatron creates the process groups. Without a GPU ``use_cpu`` is on; otherwise
    Hugging Face treats every rank as the only process.
    """
    from mca_models.megatron import platform

    return _without_backend(values) | ({"use_cpu": True} if platform.device_type() == "cpu" else {})


def _without_backend(values: Values) -> JsonObject:
    return {key: value for key, value in values.items() if key != "ddp_backend"}


def _training_class(*, early: bool) -> type:
    if early:
        return early_arguments()
    from mca_config.training import TrainingArguments

    return TrainingArguments


# Checks before torch and transformers are imported


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
    problems = _key_problems(task, settings)
    ranks = int(os.environ["WORLD_SIZE"]) if launched else None
    skipped = [*([directories] if has_hub_ids(values) else []), *([start] if launched else [])]
    problems += _model_problems(task, settings, ranks=ranks)
    problems += [problem for rule in FILE_RULES if rule not in skipped for problem in rule(task, settings)]
    problems += [*weights_problems(task, settings), *column_problems(task, settings.data)]
    problems += engine_problems(settings.training)
    _raise(problems, where)


def plan_problems(task: Task | None, values: Values, where: str, options: PlanOptions) -> list[str]:
    """Return the problems of a plan, which may name data that this machine does not have.

    Raises:
        UsageError: Keys or values are wrong.
    """
    task, flags = task or infer_task(values), [flag.name for flag in fields(options)]
    settings = make_settings(task, {"output_dir": "plan", **values}, where, flags, early=True)
    problems = _key_problems(task, settings)
    problems += _model_problems(task, settings, options)
    return list(dict.fromkeys(map(redacted, problems)))


def _key_problems(task: Task, settings: Settings) -> list[str]:
    problems = [problem for rule in KEY_RULES for problem in rule(task, settings)]
    return [*problems, *schedule_value_problems(settings.training)]


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


def _with_configurations(task: Task, settings: Settings) -> Settings:
    """Return ``settings`` with local directories for models of the Hub, of which the configurations are downloaded.

    Raises:
        UsageError: The Hub has no such model, denies access, or cannot be reached.
    """
    if not has_hub_ids(settings.values):
        return settings
    values = with_directories(settings.values, only="config")
    return make_settings(task, values, settings.where, early=True)


def _model_problems(
    task: Task, settings: Settings, options: PlanOptions | None = None, ranks: int | None = None
) -> list[str]:
    """Return the problems of the model's configuration, which may be on the Hub, and of its layout."""
    try:
        return [*_layout_problems(task, _with_configurations(task, settings), options, ranks)]
    except UsageError as error:  # of the Hub
        return [*list_problems(error)]


def _layout_problems(
    task: Task, settings: Settings, options: PlanOptions | None = None, ranks: int | None = None
) -> Iterator[str]:
    """Yield problems of the architecture, of dividing the model over the ranks, of its adapter, parts and steps.

    A search sets the layout.
    """
    ranks = ranks or (options and options.gpus) or settings.launch.nproc_per_node
    try:
        stored = model_config(settings.data.model_name_or_path)
        model = trained_model(stored, task.head(settings), task.name)
        layout = resolve_layout(settings.training, model)
        problems = [] if options and options.search else check_layout(model, layout, ranks)
        yield from problems
        if not problems:
            new_head = model.head.num_labels is not None and stored.head.num_labels is None
            config, parts = replace(model, layout=layout), trained_parts(settings.training, model)
            of_adapter = [*adapter_problems(settings.lora, config, parts, new_head=new_head)]
            yield from of_adapter or early_part_problems(settings.training, settings.lora, config)
            if training_dtype(model, settings.training) == "float16":
                yield from float16_problems(settings.training)
            if ranks and not (options and options.search):
                yield from task.problems_in_steps(samples_per_step(settings.training, layout, ranks))
    except McaError as error:
        yield from list_problems(error)


def _raise(problems: Iterable[str], where: str) -> None:
    raise_problems(dict.fromkeys(map(redacted, problems)), where, kind=UsageError)
