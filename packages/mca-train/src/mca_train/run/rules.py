"""Rules of a run: tables of everything that is checked before a model is loaded, data is read or ranks start.

`check` goes through the tables and reports all problems at once, for the run and for ``mca-train plan``. It does not
check the contents of data files. The trainer has its own table.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.arguments import float16_problems
from mca_config.checks import check_layout
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig, training_dtype
from mca_config.redaction import redacted
from mca_models.checkpoint.side_files import side_files
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import transformer_config
from mca_models.megatron.features.media import image_problems
from mca_models.templates.classification_head import with_head
from mca_train.checkpoint import output_dir_guard
from mca_train.checkpoint.directory import resolve
from mca_train.checkpoint.output_dir import require_usable
from mca_train.config.arguments import VIDEO_KEYS, LaunchArguments, LoraArguments, PairArguments
from mca_train.config.model import local_world_size, make_adapter, model_config, resolve_layout
from mca_train.config.model_parts import part_problems, trained_parts
from mca_train.config.run_config import Settings
from mca_train.data.files import check_file
from mca_train.data.row_formats import FORMAT_COLUMNS, ONE_ANSWER
from mca_train.data.sources import parse_sources
from mca_train.data.urls import is_url, require_client
from mca_train.losses.preference import reference_problems
from mca_train.lr_schedule import schedule_problems
from mca_train.run.vocabulary import tokenizer_problems, vocabulary_problems
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.megatron.factory.target import Target

_REFERENCE = "reference_model_name_or_path"
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
    platform.prepare()  # before anything below imports Megatron
    impossible = [problem for rule in KEYS for problem in rule(task, settings)]
    missing = [problem for rule in MACHINE for problem in rule(task, settings)]
    run = None
    try:
        run, unread = _read_run(task, settings, ranks)
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
    task: Task, settings: Settings, ranks: Callable[[LaunchArguments, ParallelLayout], int]
) -> tuple[Run, list[str]]:
    """Return the run with the architectures of its models, and the problems of reading the reference's."""
    stored = model_config(settings.data.model_name_or_path)
    model = _with_head(task, settings, stored)
    settings = replace(settings, data=task.resolve_labels(settings.data, model))
    layout = resolve_layout(settings.training, model)
    world_size = ranks(settings.launch, layout)
    reference, unread = _read_reference(task, settings, model)
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


def _with_head(task: Task, settings: Settings, model: McaModelConfig) -> McaModelConfig:
    """Return ``model`` with the head that the kind of run trains."""
    if (head := task.head(settings)) is not None:
        return with_head(model, head)
    if model.head.num_labels is not None:
        raise UsageError(
            f"model_name_or_path: the model has a head for {model.head.head_kind}, mca-train {task.name} trains "
            "language models; use mca-train reward or classify, or name another model"
        )
    return model


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
        return None, [f"{_REFERENCE}: {problem}" for problem in list_problems(error)]


# Keys, independent of model and machine


def sources(task: Task, settings: Settings) -> Iterator[str]:
    """Yield contradictions among the keys of training files."""
    data = settings.data
    if data.datasets and data.train_file:
        yield "train_file and datasets are both set; name the file as an entry of datasets, or remove one"
    if data.datasets and data.streaming:
        yield "streaming reads train_file, not datasets; remove one of the two"
    if data.datasets and data.max_train_samples is not None:
        yield "max_train_samples is for train_file; set max_samples in the entries of datasets"


def streaming(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of streaming: no max_steps, and keys that need or exclude it."""
    training, data = settings.training, settings.data
    if data.streaming and training.max_steps <= 0:
        yield "streaming needs max_steps: a stream has no length"
    if data.streaming and data.tokenized_cache is not None and not data.eval_file:
        yield "tokenized_cache keeps no samples of a stream; remove it or set streaming to false"
    if "shuffle_buffer_size" not in settings.values:
        return
    if not data.streaming:
        yield "shuffle_buffer_size is for streaming, others are shuffled as a whole; remove it or set streaming"
    elif data.shuffle_buffer_size > 1 and str(training.train_sampling_strategy) == "sequential":
        yield "shuffle_buffer_size shuffles, but train_sampling_strategy is sequential; remove one of the two"


def evaluation(task: Task, settings: Settings) -> Iterator[str]:
    """Yield keys of training and evaluation that contradict one another, or need an eval_file."""
    values, training, data = settings.values, settings.training, settings.data
    if values.get("do_train", True) is not True and not training.do_train:
        yield "do_train is false, but mca-train trains; remove it"
    if values.get("do_eval", True) is not True and not training.do_eval and data.eval_file:
        yield "do_eval is false, but eval_file is set, which is evaluated at the end; remove one of the two"
    if not data.eval_file:
        needs = {
            f"eval_strategy is {training.eval_strategy.value}": training.eval_strategy != "no",
            "eval_on_start is true": training.eval_on_start,
            "do_eval is true": "do_eval" in values and training.do_eval and training.eval_strategy == "no",
        }
        for setting in (setting for setting, is_on in needs.items() if is_on):
            yield f"{setting}, but eval_file is not set; set it or remove {setting.split()[0]}"
        if data.max_eval_samples is not None:
            yield "max_eval_samples is set, but eval_file is not; set it or remove max_eval_samples"
    if training.load_best_model_at_end and training.eval_strategy == "no":
        yield (
            "load_best_model_at_end is true, but eval_strategy is no, so there is no best model; set it "
            "or remove the key"
        )


def schedule(task: Task, settings: Settings) -> Iterator[str]:
    """Yield contradictions in the learning-rate schedule."""
    return schedule_problems(settings.training)


def adapter_keys(task: Task, settings: Settings) -> Iterator[str]:
    """Yield LoRA keys without effect, because no new adapter is created, and an unsupported checkpoint format."""
    lora = settings.lora
    keys = [key for key in settings.values if key in LoraArguments.__dataclass_fields__]
    unused = [key for key in keys if key not in ("lora_rank", "adapter_name_or_path")]
    if unused and lora.lora_rank is None:
        why = "adapter_name_or_path has its own" if lora.adapter_name_or_path else "lora_rank is not set"
        yield f"{', '.join(unused)}: {why}; remove the key or set lora_rank"
    if lora.is_enabled and settings.training.ckpt_format != "mca":
        yield f"an adapter is not written as {settings.training.ckpt_format}; remove ckpt_format and async_save"


def backend(task: Task, settings: Settings) -> Iterator[str]:
    """Report a ``ddp_backend`` that differs from the backend of this machine."""
    requested, expected = settings.values.get("ddp_backend"), platform.backend()
    if requested not in (None, expected):
        yield f"ddp_backend is {requested!r}; ranks of this machine communicate over {expected}; remove it"


def task_keys(task: Task, settings: Settings) -> Iterator[str]:
    """Yield what the kind of run itself does not support."""
    return task.problems(settings)


def columns(task: Task, settings: Settings) -> Iterator[str]:
    """Yield an error for column keys that neither the kind of run nor a configured format reads."""
    if unused := [key for key in settings.values if key in task.unused_columns]:
        yield f"{', '.join(unused)}: mca-train {task.name} does not read it; remove the key"
    data = settings.data
    formats = [entry.get("format") or data.data_format for entry in data.datasets]
    if data.eval_file or not formats:
        formats.append(data.data_format)
    if any(name not in ONE_ANSWER for name in formats):
        return  # inferred from the columns, or unknown and reported elsewhere
    named = [name for name in ONE_ANSWER if name in formats]
    pairs = isinstance(data, PairArguments)  # pairs read answers in every format, and the prompt in none
    read = {"tools_column"} if pairs else {column for name in named for column in FORMAT_COLUMNS[name]}
    choosing = {column for columns in FORMAT_COLUMNS.values() for column in columns} - {*task.unused_columns}
    if unread := [key for key in settings.values if key in choosing - read]:
        yield f"{', '.join(unread)}: format {', '.join(named)} does not read it; remove one of the two"


def metric(task: Task, settings: Settings) -> Iterator[str]:
    """Yield a metric_for_best_model that the kind of run does not evaluate."""
    name = (settings.training.metric_for_best_model or "loss").removeprefix("eval_")
    known = ("loss", *TIMES, *task.metric_names)
    if name not in known:
        yield f"metric_for_best_model is {name!r}; mca-train {task.name} evaluates {', '.join(known)}"


# This machine


def data_files(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of data files (unset, missing, unreadable) and of entries of ``datasets``."""
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


def directories(task: Task, settings: Settings) -> Iterator[str]:
    """Report missing directories of adapters and reference models."""
    for holder in (settings.lora, settings.own):
        for key in getattr(holder, "__dataclass_fields__", ()):
            path = getattr(holder, key) if key.endswith("_name_or_path") else None
            if path is not None and not Path(path).is_dir():
                yield f"{key}: directory {path} does not exist"


def packages(task: Task, settings: Settings) -> Iterator[str]:
    """Report packages that the optimizer needs."""
    from mca_train.trainer.rules import optimizer_problems

    return optimizer_problems(settings.training)


def output_dir(task: Task, settings: Settings) -> Iterator[str]:
    """Report an ``output_dir`` that cannot be used or written."""
    folder, data = Path(settings.training.output_dir), settings.data
    read = (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path)
    problems = list(_messages(require_usable, folder, read))
    if not problems and os.environ.get("RANK", "0") == "0":
        problems += _messages(require_writable, folder)
    yield from problems


def model_side_files(task: Task, settings: Settings) -> Iterator[str]:
    """Report side files of the model that cannot be copied into checkpoints."""
    model, lora = Path(settings.data.model_name_or_path), settings.lora
    adapts = lora.is_enabled or lora.adapter_name_or_path is not None
    if model.is_dir() and not adapts and os.environ.get("RANK", "0") == "0":
        yield from _messages(side_files, model)


def start(task: Task, settings: Settings) -> Iterator[str]:
    """Report a missing ``resume_from_checkpoint``, and an ``output_dir`` of another run."""
    yield from _messages(require_start, settings)


def require_start(settings: Settings) -> None:
    """Check ``output_dir`` and ``resume_from_checkpoint``; the ranks check the contents of a checkpoint.

    Raises:
        McaError: ``output_dir`` is of another run, or the checkpoint does not exist.
    """
    args, folder = settings.training, Path(settings.training.output_dir)
    checkpoint = resolve(args.resume_from_checkpoint, folder)
    output_dir_guard.require_free(folder, checkpoint, overwrite=args.overwrite_output_dir)


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


def tokenizer(task: Task, settings: Settings) -> Iterator[str]:
    """Report a missing or damaged tokenizer."""
    return tokenizer_problems(settings.data)


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
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    samples *= RankGrid(run.layout, run.world_size).data_parallel_size
    config = replace(config, layout=run.layout)
    new_head = config.head.num_labels is not None and run.stored.head.num_labels is None
    problems += (of_adapter := list(_adapter(run.settings, config, new_head=new_head)))
    of_parts = [] if of_adapter else [*part_problems(args, run.settings.lora, config, megatron)]
    if not of_parts and config.vision is not None and run.settings.data.image_folder is not None:
        of_parts = [f"image_folder: {problem}" for problem in image_problems(config, run.layout, megatron)]
    problems += [*of_parts, *run.task.problems_in_megatron(run.settings, megatron)]
    return [*problems, *run.task.problems_in_steps(samples)]


def _adapter(settings: Settings, config: McaModelConfig, *, new_head: bool) -> Iterator[str]:
    """Yield the problems of the adapter with the model, including a new head that a continued adapter does not train.

    Args:
        settings: Settings of the run.
        config: Configuration of the trained model, with its layout.
        new_head: The checkpoint has no head of the trained kind.
    """
    lora, path = settings.lora, settings.lora.adapter_name_or_path
    if path is not None and not Path(path).is_dir():
        return  # reported with the other directories
    try:
        adapter = make_adapter(lora, config, trained_parts(settings.training))
    except McaError as error:
        yield from list_problems(error)
        return
    if adapter is None or path is None or not new_head:
        return
    if not any(param.mca.startswith("output_layer.") for param in adapter[1].full_params):
        yield (
            f"adapter_name_or_path: the adapter in {path} does not train the new head, score; merge it into its base "
            "model (mca-convert --merge), name the result in model_name_or_path, and set lora_rank for a new one"
        )


def reference(run: Run, target: "Target | None") -> Iterator[str]:
    """Yield problems of the reference model with the trained one."""
    if run.reference is not None and run.reference is not run.model:
        for problem in reference_problems(run.reference, run.model):
            yield f"{_REFERENCE}: {problem}"


def images(run: Run, target: "Target | None") -> Iterator[str]:
    """Report keys of media for a model without a tower."""
    media = {"image_folder": "images", **dict.fromkeys(VIDEO_KEYS, "videos"), "audio_max_seconds": "audio"}
    for key, medium in media.items() if run.model.vision is None else ():
        if getattr(run.settings.data, key) is not None:
            yield f"{key}: a {run.model.model_type} model takes no {medium}; remove the key"


def vocabulary(run: Run, target: "Target | None") -> Iterator[str]:
    """Report tokens beyond the model's vocabulary, which an adapter cannot train."""
    return vocabulary_problems(run.settings, run.model.vocab_size)


KEYS: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    sources,
    streaming,
    evaluation,
    schedule,
    adapter_keys,
    backend,
    task_keys,
    columns,
    metric,
)
"""Rules that no machine could follow, from the keys alone."""
MACHINE: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    data_files,
    directories,
    output_dir,
    start,
    packages,
    model_side_files,
    tokenizer,
)
"""Rules about files, directories and packages of this machine."""
MODEL: tuple[Callable[[Run, "Target | None"], Iterable[str]], ...] = (
    architecture,
    reference,
    images,
    vocabulary,
)
"""Rules that no machine could follow, from the architecture and the layout."""
