"""Files of a run in its ``output_dir``: names, checkpoints, and checks that a run replaces no files of others.

Imports no torch, so that wrong paths are reported early.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from stat import S_ISDIR

from mca_config.errors import McaError, UsageError
from mca_config.files import naming_read_errors
from mca_config.model_config import FILE_NAME
from mca_models.storage.staging_folder import stage_for_removal

logger = logging.getLogger(__name__)

PREFIX = "checkpoint"
"""Checkpoints are named ``checkpoint-<step>``."""
STATE_FILE = "trainer_state.json"
"""Written last, so that a checkpoint with it is complete."""
HF_FOLDER = "hf"
"""The Hugging Face model of a checkpoint."""
TRAINING = "training"
"""The optimizer's state and the position in the data."""
_NAME = re.compile(rf"{PREFIX}-(\d+)")
_REPLACED = (
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
"""Files that a run may replace."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints in ``output_dir``, oldest step first.

    Raises:
        McaError: It cannot be listed.
    """
    with naming_read_errors(output_dir):
        try:
            names = [path.name for path in output_dir.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(step, output_dir / name) for name in names if (step := named_step(name)) is not None]
        return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def named_step(name: str) -> int | None:
    """Return the step of a directory that is named like a checkpoint; None: it is not."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step of one of `checkpoints`."""
    return int(checkpoint.name.removeprefix(f"{PREFIX}-"))


def resolve(resume: str | bool | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that ``resume_from_checkpoint`` selects.

    Args:
        resume: None or False: none. True or "true": the latest, which must exist. "auto": the latest if there is one.
            Else a path.
        output_dir: Directory with the run's checkpoints.

    Raises:
        McaError: It does not exist or is not complete.
    """
    word = str(resume).lower()
    if resume is None or word in ("false", "none", ""):
        return None
    if word in ("true", "last", "auto"):
        last = next(reversed(checkpoints(output_dir)), None)
        if last is None and word != "auto":
            raise McaError(
                f"resume_from_checkpoint: no complete {PREFIX}-<step> in {output_dir}"
                "; set auto to begin where there is none"
            )
        return last
    path = Path(str(resume))
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise UsageError(f"resume_from_checkpoint: {path} {what}")
    inside = checkpoints(path)
    if inside and not (path / TRAINING).is_dir():
        raise McaError(
            f"resume_from_checkpoint: {path} is the output_dir of a run; set a checkpoint in it ({inside[-1].name}), "
            "or continue that run with output_dir and auto"
        )
    if not (path / STATE_FILE).is_file():
        raise McaError(
            f"resume_from_checkpoint: {path} has no {STATE_FILE}, so it is not a training checkpoint"
            "; set a checkpoint-<step> directory of a run, or auto"
        )
    return path


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
    files = sorted(
        {str(path.relative_to(output_dir)) for name in _REPLACED for path in output_dir.glob(name)}
    )
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
        stage_for_removal(path).remove()


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
