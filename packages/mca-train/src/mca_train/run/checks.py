"""`check` finds all problems of a run at once, before it loads a model, reads data or starts ranks.

The run and ``mca-train plan`` call it. It does not check the contents of data files.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.arguments import float16_problems
from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig, training_dtype
from mca_config.redaction import redacted
from mca_config.types import Values
from mca_models.checkpoint.side_files import side_files
from mca_train.checkpoint.output_dir import require_usable
from mca_train.config.adapters import adapter_problems
from mca_train.config.arguments import LaunchArguments
from mca_train.config.checks import contradictions
from mca_train.config.model import local_world_size, model_config, resolve_layout
from mca_train.config.model_parts import part_problems
from mca_train.config.run_config import Settings, parse
from mca_train.plan.options import PlanOptions
from mca_train.run.vocabulary import tokenizer_problems, vocabulary_problems
from mca_train.tasks.columns import column_problems
from mca_train.tasks.table import other_task_keys
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.megatron.factory.target import Target

_PLAN_FLAGS = {
    flag.name: f"is a flag of mca-train plan (--{flag.name}), no key of a run; remove it"
    for flag in fields(PlanOptions)
}
TIMES = ("runtime", "samples_per_second", "steps_per_second")
"""Metrics of every evaluation in addition to the loss."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run.

    Args:
        task: Kind of run.
        settings: Arguments.
        stored: Architecture of the model's checkpoint.
        model: Architecture of the trained model, with its head.
        reference: Architecture of the reference model; None: there is none.
        layout: Parallel layout.
        world_size: Number of ranks.
    """

    task: Task
    settings: Settings
    stored: McaModelConfig
    model: McaModelConfig
    reference: McaModelConfig | None
    layout: ParallelLayout
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Problems of a run.

    Args:
        where: The file, or the file and the command line.
        run: The run; None if its architecture cannot be read.
        impossible: Problems on any machine.
        missing: Problems of this machine: missing files, directories, packages.
    """

    where: str
    run: Run | None
    impossible: tuple[str, ...]
    missing: tuple[str, ...]

    def require(self) -> Run:
        """Return the run if it has no problems.

        Raises:
            UsageError: All problems.
        """
        raise_problems([*self.impossible, *self.missing], self.where, kind=UsageError)
        assert self.run is not None, "a run without an architecture has problems"
        return self.run


def make_settings(task: Task, values: Values, where: str, flags: Iterable[str] = ()) -> Settings:
    """Convert ``values`` to the arguments of ``task``; ``flags`` are flags of the command, which are not keys.

    Raises:
        UsageError: Keys or values are wrong.
    """
    return parse(
        values,
        where,
        kind=task.name,
        data=task.data_arguments,
        own=task.task_arguments,
        elsewhere=_PLAN_FLAGS | other_task_keys(task),
        flags=flags,
    )


def check(
    task: Task,
    settings: Settings,
    ranks: Callable[[LaunchArguments, ParallelLayout], int] = local_world_size,
    target: "Target | None" = None,
) -> Findings:
    """Find all problems of a run without reading weights or rows.

    Args:
        task: The kind of run.
        settings: Its arguments.
        ranks: Function that returns the number of ranks; by default that of a start on this machine.
        target: Hardware of the ranks; None: this machine.
    """
    from mca_models.megatron import platform

    platform.prepare()  # before anything below imports Megatron
    impossible = [*contradictions(settings), *task.problems(settings), *column_problems(task, settings)]
    impossible += _metric(task, settings)
    missing = [*data_problems(settings), *_directories(settings), *_output_dir(settings), *_start(settings)]
    missing += [*_packages(settings), *_side_files(settings), *tokenizer_problems(settings.data)]
    run = None
    try:
        stored = model_config(settings.data.model_name_or_path)
        model = _with_head(task, settings, stored)
        settings = replace(settings, data=task.resolve_labels(settings.data, model))
        layout = resolve_layout(settings.training, model)
        world_size = ranks(settings.launch, layout)
        reference, reference_problems = _reference(task, settings, model)
        run = Run(
            task=task,
            settings=settings,
            stored=stored,
            model=model,
            reference=reference,
            layout=layout,
            world_size=world_size,
        )
    except McaError as error:
        impossible += list_problems(error)
    if run is not None:
        impossible += [*_architecture(run, target), *reference_problems, *_images(run)]
        impossible += vocabulary_problems(settings, model.vocab_size)
    return Findings(
        where=settings.where,
        run=run,
        impossible=tuple(dict.fromkeys(map(redacted, impossible))),
        missing=tuple(dict.fromkeys(map(redacted, missing))),
    )


def _with_head(task: Task, settings: Settings, model: McaModelConfig) -> McaModelConfig:
    """Return ``model`` with the head that the kind of run trains."""
    from mca_models.templates.classification_head import with_head

    if (head := task.head(settings)) is not None:
        return with_head(model, head)
    if model.head.num_labels is not None:
        raise UsageError(
            f"model_name_or_path: the model has a head for {model.head.head_kind}, mca-train {task.name} trains "
            "language models; use mca-train reward or classify, or name another model"
        )
    return model


def _images(run: Run) -> Iterator[str]:
    """Report an ``image_folder`` for a model without a vision tower."""
    if run.model.vision is None and run.settings.data.image_folder is not None:
        yield f"image_folder: a {run.model.model_type} model takes no images; remove the key"


def _metric(task: Task, settings: Settings) -> Iterator[str]:
    metric = (settings.training.metric_for_best_model or "loss").removeprefix("eval_")
    known = ("loss", *TIMES, *task.metric_names)
    if metric not in known:
        yield f"metric_for_best_model is {metric!r}; mca-train {task.name} evaluates {', '.join(known)}"


def _architecture(run: Run, target: "Target | None") -> list[str]:
    """Return the problems of the layout; without any, those of the model with Megatron."""
    from mca_models.megatron.factory.transformer_config import transformer_config
    from mca_models.megatron.features.image_limits import image_problems

    args, config = run.settings.training, run.model
    if problems := check_layout(config, run.layout, run.world_size):
        return problems
    try:
        megatron = transformer_config(config, args, run.layout, training_dtype(config, args), target)
    except McaError as error:
        return list(list_problems(error))
    problems = float16_problems(args) if megatron.fp16 else []
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    samples *= RankGrid(run.layout, run.world_size).data_parallel_size
    config = replace(config, layout=run.layout)
    new_head = config.head.num_labels is not None and run.stored.head.num_labels is None
    problems += (of_adapter := list(adapter_problems(run.settings, config, new_head=new_head)))
    of_parts = [] if of_adapter else [*part_problems(args, run.settings.lora, config, megatron)]
    if not of_parts and config.vision is not None and run.settings.data.image_folder is not None:
        of_parts = [f"image_folder: {problem}" for problem in image_problems(config, run.layout, megatron)]
    problems += [*of_parts, *run.task.problems_in_megatron(run.settings, megatron)]
    return [*problems, *run.task.problems_in_steps(samples)]


def _reference(
    task: Task, settings: Settings, model: McaModelConfig
) -> tuple[McaModelConfig | None, list[str]]:
    """Return the architecture of the reference model, and its problems."""
    from mca_train.losses.preference import reference_problems

    path, reference = task.reference(settings), None
    if path is None or path == settings.data.model_name_or_path:
        return None if path is None else model, []
    if not Path(path).is_dir():
        return None, []  # reported with the other directories
    try:
        reference = model_config(path)
        problems = [*reference_problems(reference, model)]
    except McaError as error:
        problems = [*list_problems(error)]
    return reference, [f"reference_model_name_or_path: {problem}" for problem in problems]


def data_problems(settings: Settings) -> Iterator[str]:
    """Yield problems of data files (unset, missing, unreadable) and of entries of ``datasets``."""
    from mca_train.data.files import check_file
    from mca_train.data.sources import parse_sources
    from mca_train.data.urls import is_url, require_client

    data = settings.data
    if not data.train_file and not data.datasets:
        yield "train_file is not set"
    yield from _messages(parse_sources, data.datasets)
    for path in (str(entry.get("path")) for entry in data.datasets):
        if is_url(path):
            yield from _messages(require_client, path, "datasets")
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        for file in files:
            yield from _messages(check_file, file, key)


def _directories(settings: Settings) -> Iterator[str]:
    for holder in (settings.lora, settings.own):
        for key in getattr(holder, "__dataclass_fields__", ()):
            path = getattr(holder, key) if key.endswith("_name_or_path") else None
            if path is not None and not Path(path).is_dir():
                yield f"{key}: directory {path} does not exist"


def _packages(settings: Settings) -> Iterable[str]:
    from mca_train.trainer.rules import optimizer_problems

    return optimizer_problems(settings.training)


def _output_dir(settings: Settings) -> Iterator[str]:
    output_dir, data = Path(settings.training.output_dir), settings.data
    read = (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path)
    problems = list(_messages(require_usable, output_dir, read))
    if not problems and os.environ.get("RANK", "0") == "0":
        problems += _messages(require_writable, output_dir)
    yield from problems


def _side_files(settings: Settings) -> Iterator[str]:
    """Report side files of the model that cannot be copied into checkpoints."""
    model, lora = Path(settings.data.model_name_or_path), settings.lora
    adapts = lora.is_enabled or lora.adapter_name_or_path is not None
    if model.is_dir() and not adapts and os.environ.get("RANK", "0") == "0":
        yield from _messages(side_files, model)


def _start(settings: Settings) -> Iterator[str]:
    """Report a missing ``resume_from_checkpoint``, and an ``output_dir`` of another run."""
    yield from _messages(require_start, settings)


def require_start(settings: Settings) -> None:
    """Check ``output_dir`` and ``resume_from_checkpoint``; the ranks check the contents of a checkpoint.

    Raises:
        McaError: ``output_dir`` is of another run, or the checkpoint does not exist.
    """
    from mca_train.checkpoint import output_dir_guard
    from mca_train.checkpoint.directory import resolve

    args, output_dir = settings.training, Path(settings.training.output_dir)
    start = resolve(args.resume_from_checkpoint, output_dir)
    output_dir_guard.require_free(output_dir, start, overwrite=args.overwrite_output_dir)


def require_writable(folder: Path) -> None:
    """Create and write ``output_dir`` as a check, and remove it again if it did not exist.

    Raises:
        McaError: The directory cannot be written.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise McaError(
            f"output_dir: {folder} cannot be written ({reason}); name another directory"
        ) from error
    finally:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def _messages(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    try:
        check(*arguments)
    except McaError as error:
        yield from list_problems(error)
