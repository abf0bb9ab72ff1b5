"""Rules of a run about files, directories and packages of this machine. They import no torch."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mca_config.errors import McaError, raised_problems
from mca_models.checkpoint.side_files import side_files
from mca_train.checkpoint.output_files import require_free, require_usable, resolve
from mca_train.config.packages import optimizer_problems
from mca_train.config.run_config import Settings
from mca_train.data.files import check_file
from mca_train.data.sources import parse_sources
from mca_train.data.urls import is_url, require_client
from mca_train.run.vocabulary import tokenizer_problems
from mca_train.tasks.task import Task


def data_files(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of data files (unset, missing, unreadable) and of entries of ``datasets``."""
    data = settings.data
    if not data.train_file and not data.datasets:
        yield "train_file is not set; name a file with rows, or several sources under datasets"
    yield from raised_problems(parse_sources, data.datasets)
    for path in (str(entry.get("path")) for entry in data.datasets):
        if is_url(path):
            yield from raised_problems(require_client, path, "datasets")
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        for file in files:
            yield from raised_problems(check_file, file, key)


def directories(task: Task, settings: Settings) -> Iterator[str]:
    """Report missing directories of adapters and reference models."""
    for holder in (settings.lora, settings.own):
        for key in getattr(holder, "__dataclass_fields__", ()):
            path = getattr(holder, key) if key.endswith("_name_or_path") else None
            if path is not None and not Path(path).is_dir():
                yield f"{key}: directory {path} does not exist"


def output_dir(task: Task, settings: Settings) -> Iterator[str]:
    """Report an ``output_dir`` that cannot be used or written."""
    folder, data = Path(settings.training.output_dir), settings.data
    read = (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path)
    problems = list(raised_problems(require_usable, folder, read))
    if not problems and os.environ.get("RANK", "0") == "0":
        problems += raised_problems(require_writable, folder)
    yield from problems


def start(task: Task, settings: Settings) -> Iterator[str]:
    """Report a missing ``resume_from_checkpoint``, and an ``output_dir`` of another run."""
    yield from raised_problems(require_start, settings)


def require_start(settings: Settings) -> None:
    """Check ``output_dir`` and ``resume_from_checkpoint``; the ranks check the contents of a checkpoint.

    Raises:
        McaError: ``output_dir`` is of another run, or the checkpoint does not exist.
    """
    args, folder = settings.training, Path(settings.training.output_dir)
    checkpoint = resolve(args.resume_from_checkpoint, folder)
    require_free(folder, checkpoint, overwrite=args.overwrite_output_dir)


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


def model_side_files(task: Task, settings: Settings) -> Iterator[str]:
    """Report side files of the model that cannot be copied into checkpoints."""
    model, lora = Path(settings.data.model_name_or_path), settings.lora
    adapts = lora.is_enabled or lora.adapter_name_or_path is not None
    if model.is_dir() and not adapts and os.environ.get("RANK", "0") == "0":
        yield from raised_problems(side_files, model)


def tokenizer(task: Task, settings: Settings) -> Iterator[str]:
    """Report a missing or damaged tokenizer."""
    return tokenizer_problems(settings.data)


def packages(task: Task, settings: Settings) -> Iterator[str]:
    """Report packages that the optimizer needs."""
    return optimizer_problems(settings.training)


FILE_RULES: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    data_files,
    directories,
    output_dir,
    start,
    model_side_files,
    tokenizer,
    packages,
)
