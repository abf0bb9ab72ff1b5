"""`OutputDir`: the ``output_dir`` of a trainer, and which checkpoints in it belong to the trainer's runs.

`mca_train.checkpoint.output_files` has the checks; `saver` writes the files.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_train.checkpoint import directory
from mca_train.checkpoint.output_files import (
    PREFIX,
    checkpoints_except,
    remove_other_run,
    require_free,
    set_aside_newer,
    set_aside_same_step,
)
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.writer import CheckpointWriter, name_errors, remove_unfinished
from mca_train.trainer.base import HfTrainer, Progress

logger = logging.getLogger(__name__)


class OutputDir:
    """Directory of a trainer's runs: one process group at a time writes into it, and it holds one run's checkpoints.

    `train` without a checkpoint to resume from begins a run; in a directory that the trainer has claimed already it
    begins a *new round*, whose first complete checkpoint replaces those of the round before. A run that resumes deletes
    nothing: it renames checkpoints of later steps.

    Args:
        hf: The trainer with the arguments, whose ``output_dir`` may change between runs.
        checkpoints: Writes and deletes the checkpoints.
        progress: Progress of the run.
    """

    def __init__(self, hf: HfTrainer, checkpoints: CheckpointWriter, progress: Progress) -> None:
        self._hf, self._checkpoints, self._progress = hf, checkpoints, progress
        self.lock: OutputLock | None = None
        """Lock of the directory if the caller has taken it; else `locked` takes it."""
        self._claimed: Path | None = None
        self._is_new_round = False

    @property
    def path(self) -> Path:
        """Path of the directory."""
        return Path(self._hf.args.output_dir)

    @property
    def has_claimed(self) -> bool:
        """All checkpoints in the directory belong to this trainer's runs."""
        return self._claimed == self.path.resolve()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory within the block."""
        if self.lock is not None:
            yield
            return
        lock = OutputLock(self.path)
        run_on_first_rank_unwrapped(lock.take)
        self.lock = lock
        try:
            yield
        finally:
            self.lock = None
            lock.release()

    def verify_lock(self) -> None:
        """Raise if another run may have taken the directory since."""
        if self.lock is not None:
            self.lock.verify()

    def claim(self, checkpoint: Path | None) -> None:
        """Reserve the directory for the checkpoints of the run that starts.

        Args:
            checkpoint: Checkpoint to resume from.

        Raises:
            UsageError: It holds the checkpoints of another run.
        """
        args, was_new_round = self._hf.args, self._is_new_round
        self._is_new_round = checkpoint is None and self.has_claimed
        if not self._is_new_round:
            require_free(self.path, checkpoint, overwrite=args.overwrite_output_dir)
        elif not was_new_round and args.save_strategy != "no":
            self._warn_about_new_round()
        self._claimed = self.path.resolve()
        self._checkpoints.written.clear()

    def _warn_about_new_round(self) -> None:
        if self._hf.ranks.is_first and checkpoints_except(self.path, []):
            logger.warning(
                "train() again: the first checkpoint of this round replaces those in %s; set another output_dir "
                "to keep them",
                self.path,
            )

    def remove_leftovers(self, checkpoint: Path | None) -> None:
        """Delete what killed runs left, and another run's files with ``overwrite_output_dir``."""
        if not self._hf.ranks.is_first:
            return
        remove_unfinished(self.path, PREFIX)
        if self._hf.args.overwrite_output_dir and not self._is_new_round:
            remove_other_run(self.path, checkpoint, self._hf.state.global_step)

    def checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``."""
        return self.path / f"{PREFIX}-{step}"

    def set_aside_same_step(self, target: Path) -> None:
        """Rename a complete checkpoint at ``target`` from before the run resumed."""
        if not self._is_new_round:
            started, written = self._progress.started_at_step, self._checkpoints.written
            with name_errors(target):
                run_on_first_rank_unwrapped(lambda: set_aside_same_step(target, started, written))

    def delete_old_checkpoints(self, best: str | None) -> None:
        """Delete or rename those of other runs, then delete those beyond ``save_total_limit`` except ``best``."""
        with name_errors(self.path):
            run_on_first_rank_unwrapped(lambda: self._delete_old_checkpoints(best))

    def _delete_old_checkpoints(self, best: str | None) -> None:
        written, limit = self._checkpoints.written, self._hf.args.save_total_limit
        if self._is_new_round:
            for path in checkpoints_except(self.path, written):
                logger.info("deleting %s (of an earlier round of training)", path)
                self._checkpoints.delete(path)
        else:
            set_aside_newer(self.path, self._progress.started_at_step, written)
        for path in directory.checkpoints_to_delete(self.path, limit, best):
            logger.info("deleting %s (save_total_limit %d)", path, limit)
            self._checkpoints.delete(path)
