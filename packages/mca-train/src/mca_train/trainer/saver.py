"""`Saver` writes the model, and checkpoints to resume from; `OutputDir` decides which old ones are kept.

``checkpoint`` writes and checks the files, and `loop` decides when.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import TrainerState

from mca_models.megatron.distributed.collectives import run_on_first_rank, run_on_first_rank_unwrapped
from mca_train.checkpoint import directory, output_files
from mca_train.checkpoint.integrity import ARGUMENTS_FILE, Checksums
from mca_train.checkpoint.model import ModelWriter
from mca_train.checkpoint.output_files import (
    PREFIX,
    checkpoints_except,
    remove_other_run,
    require_free,
    set_aside_newer,
    set_aside_same_step,
)
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.training_state import LoopState, TrainingState
from mca_train.checkpoint.writer import CheckpointWriter, WriteStage, name_errors, remove_unfinished
from mca_train.engine.finite import require_finite_weights
from mca_train.trainer.base import HfTrainer, Progress, reset_patience, restore_counters
from mca_train.trainer.logger import Logger
from mca_train.trainer.model_runner import ModelRunner

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


class Saver:
    """Saving of a trainer's model and checkpoints; collective like the trainer itself.

    Args:
        hf: The trainer.
        runner: Runs the model.
        log: Logger, whose sums checkpoints hold.
        checkpoints: Writes the checkpoints.
        progress: Progress of the run.
    """

    def __init__(
        self,
        hf: HfTrainer,
        runner: ModelRunner,
        log: Logger,
        checkpoints: CheckpointWriter,
        progress: Progress,
    ) -> None:
        self._hf, self._model, self._watch = hf, hf.model, hf.watch
        self._runner, self._logger, self._progress = runner, log, progress
        self.checkpoints, self.output = checkpoints, OutputDir(hf, checkpoints, progress)

    def save_model(self, folder: Path) -> None:
        """Write the model as an MCA checkpoint into ``folder``, with the tokenizer; all ranks take part."""
        with self._runner.pipeline.params_gathered(), name_errors(folder):
            hf = self._hf.args.save_hf_model
            ModelWriter(self._model, folder, self._hf.processing_class, hf=hf).finish()

    def complete_checkpoint(self) -> None:
        """Write a complete checkpoint of this step, unless there is one."""
        self.checkpoints.finish()
        written = [path.name for path in self.checkpoints.written]
        step = self._hf.state.global_step
        if step != self._progress.started_at_step and f"{output_files.PREFIX}-{step}" not in written:
            self._hf._save_checkpoint(self._model, None)
            self.checkpoints.finish()

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step; with ``async_save`` it is complete some steps later."""
        current = self._hf.state
        with self._runner.pipeline.params_gathered():
            require_finite_weights(current.global_step, self._model.trained_parameters())
        target = self.output.checkpoint_path(current.global_step)
        if current.best_global_step == current.global_step:
            current.best_model_checkpoint = str(target)
        self.checkpoints.finish()
        self.output.set_aside_same_step(target)
        state = copy.copy(current) if self._hf.args.async_save else current
        self.checkpoints.write(target, self._begin_checkpoint, lambda: self._after_checkpoint(state))

    def _begin_checkpoint(self, folder: Path) -> list[WriteStage]:
        """Start writing into ``folder``; return the pending stages in order."""
        args = self._hf.args
        with self._runner.pipeline.params_gathered():
            stages: list[WriteStage] = [
                ModelWriter(
                    self._model,
                    folder,
                    self._hf.processing_class,
                    hf=args.save_hf_model,
                    ckpt_format=args.ckpt_format,
                    async_save=args.async_save,
                )
            ]
        run_on_first_rank(lambda: self._write_state(folder))
        if not args.save_only_model or self._watch.stopped:  # a stopped run resumes later
            loop_state = self._logger.loop_state()
            stages.append(self.training_state().begin_save(folder, loop_state, background=args.async_save))
            stages.append(Checksums(folder, self._hf.ranks))
        return stages

    def _after_checkpoint(self, state: TrainerState) -> None:
        """Delete old checkpoints and call the callbacks; ``state`` is that of the checkpoint's step."""
        self.output.delete_old_checkpoints(state.best_model_checkpoint)
        another = self._hf.control.should_save
        self._hf.fire("on_save", state=state)
        self._hf.control.should_save = another

    def load_state(self, checkpoint: Path | None) -> LoopState:
        """Set a new `TrainerState`, or that of the checkpoint, and return the loop state."""
        hf, loop_state = self._hf, LoopState()
        callbacks = hf.callback_handler.callbacks
        if checkpoint is None:
            hf.state = TrainerState(stateful_callbacks=hf.exportable())
        else:
            hf.state = TrainerState.load_from_json(str(checkpoint / output_files.STATE_FILE))
            directory.locate_best(hf.state, checkpoint)
            restore_counters(callbacks, hf.state.stateful_callbacks)
            hf._load_callback_state()
            if directory.reset_best_metric(hf.state, checkpoint, hf.args):
                reset_patience(callbacks)
            loop_state = directory.load_loop_state(checkpoint)
        hf.state.train_batch_size = hf.args.per_device_train_batch_size
        hf.state.is_world_process_zero = hf.is_world_process_zero()
        hf.state.is_local_process_zero = hf.is_local_process_zero()
        hf.control._new_training()
        return loop_state

    def _write_state(self, folder: Path) -> None:
        self.output.verify_lock()
        state = self._hf.state
        state.stateful_callbacks = self._hf.callback_states()
        state.save_to_json(str(folder / output_files.STATE_FILE))
        (folder / ARGUMENTS_FILE).write_text(self._hf.args.to_json_string())

    def training_state(self) -> TrainingState:
        """Return what a checkpoint holds of optimizer, schedule, random states and position."""
        training, position = self._runner.training, self._progress.position
        control, state = self._hf.control, self._hf.state
        # a callback that sets both flags ends a run that may resume there
        early = state.global_step < state.max_steps
        paused = control.should_training_stop and early and not self._watch.stopped
        ended = position.epoch_ended or (control.should_epoch_stop and not paused)
        position = replace(position, epoch_ended=bool(ended))
        return TrainingState(training.engine, training.rate, self._hf.ranks, position)
