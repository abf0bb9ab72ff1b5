"""Rules of a run: tables of everything that is checked before a model is loaded, data is read or ranks start.

`check` goes through the tables and reports all problems at once, for the run and for ``mca-train plan``. It does not
check the contents of data files. The trainer has its own table.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.arguments import float16_problems
from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig, training_dtype
from mca_config.redaction import redacted
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import transformer_config
from mca_models.megatron.features.media import image_problems
from mca_train.config.arguments import VIDEO_KEYS, LaunchArguments
from mca_train.config.model import (
    adapter_problems,
    local_world_size,
    model_config,
    resolve_layout,
    samples_per_step,
    trained_model,
)
from mca_train.config.model_parts import part_problems, trained_parts
from mca_train.config.run_config import Settings
from mca_train.losses.preference import reference_problems
from mca_train.lr_schedule import schedule_problems
from mca_train.run.early_rules import FILE_RULES, KEY_RULES, vocabulary_problems
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.megatron.factory.transformer_config import Target

REFERENCE = "reference_model_name_or_path"


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


def check(
    task: Task,
    settings: Settings,
    ranks: Callable[[LaunchArguments, ParallelLayout], int] = local_world_size,
    target: "Target | None" = None,
    *,
    machine: bool = True,
    searched: Run | None = None,
) -> Findings:
    """Find all problems of a run without reading weights or rows.

    Args:
        task: The kind of run.
        settings: Its arguments.
        ranks: Function that returns the number of ranks; by default that of a start on this machine.
        target: Hardware of the ranks; None: this machine.
        machine: Apply the rules about files, directories and packages of this machine.
        searched: Run without problems that differs in layout alone: its models and its learning rates are known.
    """
    platform.prepare()  # before anything below imports Megatron
    rules = [rule for rule in KEYS if searched is None or rule is not _schedule]
    impossible = [problem for rule in rules for problem in rule(task, settings)]
    missing = [problem for rule in MACHINE for problem in rule(task, settings)] if machine else []
    run = None
    try:
        run, unread = _read_run(task, settings, ranks, searched)
    except McaError as error:
        impossible += list_problems(error)
    else:
        impossible += [problem for rule in MODEL for problem in rule(run, target)]
        impossible += unread
    return Findings(
        where=settings.where,
        run=run,
        impossible=tuple(dict.fromkeys(map(redacted, impossible))),
        missing=tuple(dict.fromkeys(map(redacted, missing))),
    )


def _read_run(
    task: Task,
    settings: Settings,
    ranks: Callable[[LaunchArguments, ParallelLayout], int],
    searched: Run | None,
) -> tuple[Run, list[str]]:
    """Return the run with the architectures of its models, and the problems of reading the reference's."""
    stored = searched.stored if searched else model_config(settings.data.model_name_or_path)
    model = trained_model(stored, task.head(settings), task.name)
    settings = replace(settings, data=task.resolve_labels(settings.data, model))
    layout = resolve_layout(settings.training, model)
    world_size = ranks(settings.launch, layout)
    reference, unread = (searched.reference, []) if searched else _read_reference(task, settings, model)
    run = Run(
        task=task,
        settings=settings,
        stored=stored,
        model=model,
        reference=reference,
        layout=layout,
        world_size=world_size,
    )
    return run, unread


def _read_reference(
    task: Task, settings: Settings, model: McaModelConfig
) -> tuple[McaModelConfig | None, list[str]]:
    """Return the architecture of the reference model, and the problems of reading it."""
    path = task.reference(settings)
    if path is None or path == settings.data.model_name_or_path:
        return None if path is None else model, []
    if not Path(path).is_dir():
        return None, []  # reported with the other directories
    try:
        return model_config(path), []
    except McaError as error:
        return None, [f"{REFERENCE}: {problem}" for problem in list_problems(error)]


# Keys, independent of model and machine


def _schedule(task: Task, settings: Settings) -> Iterable[str]:
    return schedule_problems(settings.training)


def backend(task: Task, settings: Settings) -> Iterator[str]:
    """Report a ``ddp_backend`` that differs from the backend of this machine."""
    requested, expected = settings.values.get("ddp_backend"), platform.backend()
    if requested not in (None, expected):
        yield f"ddp_backend is {requested!r}; ranks of this machine communicate over {expected}; remove it"


# The model


def architecture(run: Run, target: "Target | None") -> list[str]:
    """Return the problems of the layout; without any, those of the model with Megatron."""
    args, config = run.settings.training, run.model
    if problems := check_layout(config, run.layout, run.world_size):
        return problems
    try:
        megatron = transformer_config(config, args, run.layout, training_dtype(config, args), target)
    except McaError as error:
        return list(list_problems(error))
    problems = float16_problems(args) if megatron.fp16 else []
    config = replace(config, layout=run.layout)
    new_head = config.head.num_labels is not None and run.stored.head.num_labels is None
    problems += (
        of_adapter := list(
            adapter_problems(run.settings.lora, config, trained_parts(args, config), new_head=new_head)
        )
    )
    of_parts = [] if of_adapter else [*part_problems(args, run.settings.lora, config, megatron)]
    if not of_parts and config.vision is not None and run.settings.data.image_folder is not None:
        of_parts = [f"image_folder: {problem}" for problem in image_problems(config, run.layout, megatron)]
    problems += [*of_parts, *run.task.problems_in_megatron(run.settings, megatron)]
    return [*problems, *run.task.problems_in_steps(samples_per_step(args, run.layout, run.world_size))]


def reference(run: Run, target: "Target | None") -> Iterator[str]:
    """Yield problems of the reference model with the trained one."""
    if run.reference is not None and run.reference is not run.model:
        for problem in reference_problems(run.reference, run.model):
            yield f"{REFERENCE}: {problem}"


def images(run: Run, target: "Target | None") -> Iterator[str]:
    """Report keys of media for a model without a tower."""
    media = {"image_folder": "images", **dict.fromkeys(VIDEO_KEYS, "videos"), "audio_max_seconds": "audio"}
    media |= {"use_audio_in_video": "videos"}
    for key, medium in media.items() if run.model.vision is None else ():
        if getattr(run.settings.data, key) not in (None, False):
            yield f"{key}: a {run.model.model_type} model takes no {medium}; remove the key"


KEYS: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    *KEY_RULES,
    _schedule,
    backend,
)
"""Rules that no machine could follow, from the keys alone."""
MACHINE: tuple[Callable[[Task, Settings], Iterable[str]], ...] = FILE_RULES
"""Rules about files, directories and packages of this machine."""
MODEL: tuple[Callable[[Run, "Target | None"], Iterable[str]], ...] = (
    architecture,
    reference,
    images,
    lambda run, target: vocabulary_problems(run.settings, run.model.vocab_size),
)
"""Rules that no machine could follow, from the architecture and the layout."""
