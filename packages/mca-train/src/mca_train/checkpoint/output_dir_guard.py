"""Checkpoints in an ``output_dir`` belong to one run, each made from the one before.

A new run raises an error if another run's checkpoints are there, or deletes them with ``overwrite_output_dir``. A run
that resumes from an earlier checkpoint renames the later ones when it writes its first checkpoint, and one of the same
step just before; with ``overwrite_output_dir`` when it starts. ``auto`` and ``save_total_limit``, which use the step,
therefore see only one run. A trainer that calls ``train`` again from step 0 deletes the checkpoints of the previous
round when it has the first of the next.
"""

import logging
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from mca_config.errors import UsageError
from mca_models.storage.partial_folder import retire
from mca_train.checkpoint.output_files import checkpoint_step, checkpoints

logger = logging.getLogger(__name__)


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
