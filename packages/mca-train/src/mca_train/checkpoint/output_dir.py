"""Checks of an ``output_dir``: a run replaces no files of others, and its checkpoints belong to one run."""

import json
import logging
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from stat import S_ISDIR

from mca_config.errors import McaError, UsageError
from mca_config.files import naming_read_errors
from mca_config.model_config import FILE_NAME
from mca_models.storage.partial_folder import retire
from mca_train.checkpoint.output_files import HF_FOLDER, checkpoint_step, checkpoints

_WRITTEN = (
    "config.json",
    "latest_checkpointed_iteration.txt",
    "trainer_state.json",
    "tokenizer*.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "iter_*",
    "checkpoint-*",
    f"{HF_FOLDER}/*",
)
logger = logging.getLogger(__name__)


def require_usable(output_dir: Path, sources: Iterable[str | Path | None]) -> None:
    """Raise unless a run may write into ``output_dir``.

    Args:
        output_dir: May be missing, hold an earlier run of `mca_train`, or files whose names a run does not use.
        sources: Directories that the run reads its model from.

    Raises:
        McaError: It is one of ``sources`` or inside one, it holds a model or checkpoints that mca did not write, or
            cannot be read.
    """
    sources = list(sources)
    with naming_read_errors(output_dir):
        try:
            _require_usable(output_dir, sources)
        except FileNotFoundError:  # under torchrun the first rank creates and removes it as a test
            _require_usable(output_dir, sources)


def _require_usable(output_dir: Path, sources: Iterable[str | Path | None]) -> None:
    if _is_file(output_dir):
        raise McaError(f"output_dir: {output_dir} is a file; set a directory")
    if output_dir.is_symlink() and not output_dir.exists():
        raise McaError(f"output_dir: {output_dir} is a broken link; create its target, or set a directory")
    here = output_dir.resolve()
    for source in (source for source in sources if source is not None):
        read = Path(source).resolve()
        if read in (here, here / HF_FOLDER):
            raise McaError(
                f"output_dir: {output_dir} is where the run reads {source}, which it would overwrite; set another "
                "directory"
            )
        if read in here.parents:
            raise McaError(
                f"output_dir: {output_dir} is inside {source}, which the run reads; set "
                "a directory outside of it"
            )
    if not output_dir.is_dir() or any(_traces(output_dir)):
        return
    files = sorted({str(path.relative_to(output_dir)) for name in _WRITTEN for path in output_dir.glob(name)})
    if files:
        names = ", ".join(files[:4]) + (", ..." if len(files) > 4 else "")
        raise McaError(
            f"output_dir: {output_dir} holds {names}, which mca did not write and a run may replace; set a new "
            "directory"
        )


def _is_file(path: Path) -> bool:
    """Return True if the path exists and is not a directory, by one stat call."""
    try:
        return not S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _traces(output_dir: Path) -> Iterator[bool]:
    """Yield True for every trace that a run of mca leaves, early or late."""
    yield (output_dir / "train_log.jsonl").is_file()
    yield _is_ours(output_dir)
    yield from (_is_ours(path) for path in output_dir.glob("checkpoint-*"))


def _is_ours(folder: Path) -> bool:
    try:
        return "mca_version" in json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def require_free(output_dir: Path, start: Path | None, *, overwrite: bool) -> None:
    """Raise if ``output_dir`` holds the checkpoints of another run.

    Args:
        output_dir: Of the run.
        start: The checkpoint that the run resumes from.
        overwrite: The checkpoints of another run may be deleted.

    Raises:
        UsageError: It holds some, and the run does not resume from one of them.
    """
    existing = checkpoints(output_dir)
    if not existing or overwrite or _contains(output_dir, start):
        return
    names = ", ".join(path.name for path in existing[:3]) + (", ..." if len(existing) > 3 else "")
    raise UsageError(
        f"output_dir: {output_dir} holds the checkpoints of another run ({names}); continue that run "
        "(resume_from_checkpoint auto), set another directory, or delete them (overwrite_output_dir true)"
    )


def remove_other_run(output_dir: Path, start: Path | None, step: int) -> None:
    """Delete the checkpoints of another run; if ``start`` is one of them, rename the later ones instead.

    Args:
        output_dir: Of the run.
        start: The checkpoint that the run resumes from.
        step: First step of the run.
    """
    if _contains(output_dir, start):
        set_aside_newer(output_dir, step, [])
        return
    for path in checkpoints(output_dir):
        logger.info("deleting %s (overwrite_output_dir)", path)
        retire(path).remove()


def set_aside_newer(output_dir: Path, first: int, written: Iterable[Path]) -> None:
    """Rename the checkpoints after the one that the run resumed from.

    Args:
        output_dir: Of the run.
        first: The step that it resumed from.
        written: The checkpoints written since.
    """
    for path in checkpoints_except(output_dir, written):
        _set_aside(path, first)


def checkpoints_except(output_dir: Path, written: Iterable[Path]) -> list[Path]:
    """Return the checkpoints in ``output_dir`` that are not in ``written``."""
    names = {path.name for path in written}
    return [path for path in checkpoints(output_dir) if path.name not in names]


def set_aside_same_step(target: Path, first: int, written: Iterable[Path]) -> None:
    """Rename a complete checkpoint at ``target`` from before the run resumed, as `set_aside_newer`."""
    if target.name in {path.name for path in checkpoints(target.parent)} - {path.name for path in written}:
        _set_aside(target, first)


def _set_aside(path: Path, first: int) -> None:
    if checkpoint_step(path) > first:
        free = (f"{path.name}.set-aside{f'-{number}' if number else ''}" for number in count())
        aside = next(name for name in free if not path.with_name(name).exists())
        logger.warning("%s: this run resumed from step %d; the checkpoint is now %s", path, first, aside)
        path.rename(path.with_name(aside))


def _contains(output_dir: Path, checkpoint: Path | None) -> bool:
    return checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
