"""Whose checkpoints stand in an ``output_dir``: those of one run, each made from the one before.

A new run is refused where another one's stand, or deletes them if that is asked for. A run that resumes from an
earlier checkpoint sets the later ones aside when it writes its first own, and one of the same step just before; with
``overwrite_output_dir`` when it begins. So
``auto`` and ``save_total_limit``, which go by the step, find only a run's own. A trainer that trains in rounds, each
from step 0 on, deletes the checkpoints of the round before when it has the first of the next.
"""

import logging
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from mca_config.errors import UsageError
from mca_models.storage.partial_folder import retire
from mca_train.checkpoint.directory import checkpoints, step_of

logger = logging.getLogger(__name__)


def require_free(output_dir: Path, start: Path | None, *, overwrite: bool) -> None:
    """Refuses an ``output_dir`` with the checkpoints of another run.

    Args:
        output_dir: Of the run.
        start: The checkpoint that it goes on from.
        overwrite: The others may be removed.

    Raises:
        UsageError: It holds some, and the run does not go on from one of them.
    """
    others = checkpoints(output_dir)
    if not others or overwrite or _stands_in(output_dir, start):
        return
    names = ", ".join(path.name for path in others[:3]) + (", ..." if len(others) > 3 else "")
    raise UsageError(
        f"output_dir: {output_dir} holds the checkpoints of another run ({names}); go on with that run "
        "(resume_from_checkpoint auto), name another directory, or have them removed (overwrite_output_dir true)"
    )


def remove_others(output_dir: Path, start: Path | None, step: int) -> None:
    """Removes the checkpoints of another run; if ``start`` is one of them, that run goes on, and later ones step aside.

    Args:
        output_dir: Of the run.
        start: The checkpoint that it goes on from.
        step: At which it begins.
    """
    if _stands_in(output_dir, start):
        set_aside_newer(output_dir, step, [])
        return
    for path in checkpoints(output_dir):
        logger.info("deleting %s (overwrite_output_dir)", path)
        retire(path).remove()


def set_aside_newer(output_dir: Path, first: int, own: Iterable[Path]) -> None:
    """Renames what a run had written before it went back.

    Args:
        output_dir: Of the run.
        first: The step that it went back to.
        own: The checkpoints that it has written since.
    """
    for path in all_but(output_dir, own):
        _set_aside(path, first)


def all_but(output_dir: Path, own: Iterable[Path]) -> list[Path]:
    """The checkpoints in ``output_dir`` but for a run's ``own``."""
    names = {path.name for path in own}
    return [path for path in checkpoints(output_dir) if path.name not in names]


def make_way(target: Path, first: int, own: Iterable[Path]) -> None:
    """Renames a complete checkpoint at ``target`` that a run had written before it went back, as `set_aside_newer`."""
    if target.name in {path.name for path in checkpoints(target.parent)} - {path.name for path in own}:
        _set_aside(target, first)


def _set_aside(path: Path, first: int) -> None:
    if step_of(path) > first:
        free = (f"{path.name}.set-aside{f'-{number}' if number else ''}" for number in count())
        aside = next(name for name in free if not path.with_name(name).exists())
        logger.warning("%s: this run resumed from step %d; the checkpoint is now %s", path, first, aside)
        path.rename(path.with_name(aside))


def _stands_in(output_dir: Path, checkpoint: Path | None) -> bool:
    return checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
