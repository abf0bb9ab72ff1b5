"""Trainer methods that save the model and checkpoints to resume from.

``checkpoint`` writes the files; `logging` decides when.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mca_config.types import JsonObject
from mca_models.megatron.distributed.collectives import run_on_first_rank, run_on_first_rank_unwrapped
from mca_train.checkpoint import directory, output_dir_guard
from mca_train.checkpoint.integrity import ARGUMENTS_FILE, Checksums
from mca_train.checkpoint.loop_state import LoopState
from mca_train.checkpoint.model import ModelWriter
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.training_state import TrainingState
from mca_train.checkpoint.writer import WriteStage, name_errors
from mca_train.engine.finite import require_finite_weights
from mca_train.trainer.hf_shims import reset_patience, restore_counters
from mca_train.trainer.logging import LoggingMixin

logger = logging.getLogger(__name__)


class CheckpointMixin(LoggingMixin):
    """Saving of a trainer's model and checkpoints; collective like the trainer itself."""

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of ``output_dir`` within the block."""
        if self.output_lock is not None:
            yield
            return
        lock = OutputLock(Path(self.args.output_dir))
        run_on_first_rank_unwrapped(lock.take)
        self.output_lock = lock
        try:
            yield
        finally:
            self.output_lock = None
            lock.release()

    def _claim(self, output_dir: Path, checkpoint: Path | None) -> None:
        """Reserve ``output_dir`` for the checkpoints of this run, or of this trainer's earlier ones.

        Args:
            output_dir: Of the run.
            checkpoint: Checkpoint to resume from, of the same kind of run.
        """
        if checkpoint is not None:
            directory.require_kind(checkpoint, self.run_kind)
        again = checkpoint is None and self._claimed == output_dir.resolve()
        replaces_first = again and not self._replaces and self.args.save_strategy != "no"
        if replaces_first and self.ranks.is_first and output_dir_guard.checkpoints_except(output_dir, []):
            logger.warning(
                "train() again: the first checkpoint of this round replaces those in %s; set another output_dir "
                "to keep them",
                output_dir,
            )
        self._replaces = again
        if not again:
            output_dir_guard.require_free(output_dir, checkpoint, overwrite=self.args.overwrite_output_dir)
        self._claimed = output_dir.resolve()
        self._checkpoints.written.clear()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as an MCA checkpoint, with the tokenizer; all ranks take part.

        Args:
            output_dir: None: the run's own.
        """
        folder = Path(output_dir or self.args.output_dir)
        with self._pipeline.params_gathered(), name_errors(folder):
            hf = self.args.save_hf_model
            ModelWriter(self.model, folder, self.processing_class, hf=hf).finish()

    def complete_checkpoint(self) -> None:
        """Write a complete checkpoint of this step, unless there is one."""
        self._checkpoints.finish()
        written = [path.name for path in self._checkpoints.written]
        step = self.state.global_step
        if step != self.started_at_step and f"{directory.PREFIX}-{step}" not in written:
            self._save_checkpoint()
            self._checkpoints.finish()

    def _save_checkpoint(self, *_: object, **__: object) -> None:
        """Write a checkpoint of this step; with ``async_save`` it is complete some steps later."""
        target = Path(self.args.output_dir) / f"{directory.PREFIX}-{self.state.global_step}"
        with self._pipeline.params_gathered():
            require_finite_weights(self.state.global_step, self.model.trained_parameters())
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(target)
        self._checkpoints.finish()
        if not self._replaces:
            with name_errors(target):
                run_on_first_rank_unwrapped(
                    lambda: output_dir_guard.set_aside_same_step(
                        target, self.started_at_step, self._checkpoints.written
                    )
                )
        state = copy.copy(self.state) if self.args.async_save else self.state
        self._checkpoints.write(target, self._begin_checkpoint, lambda: self._after_checkpoint(state))

    def _begin_checkpoint(self, folder: Path) -> list[WriteStage]:
        """Start writing into ``folder``; return the pending stages in order."""
        args = self.args
        with self._pipeline.params_gathered():
            stages: list[WriteStage] = [
                ModelWriter(
                    self.model,
                    folder,
                    self.processing_class,
                    hf=args.save_hf_model,
                    ckpt_format=args.ckpt_format,
                    async_save=args.async_save,
                )
            ]
        run_on_first_rank(lambda: self._write_state(folder))
        if not args.save_only_model or self.watch.stopped:  # a stopped run resumes later
            stages.append(
                self._training_state().begin_save(folder, self._loop_state(), background=args.async_save)
            )
            stages.append(Checksums(folder, self.ranks))
        return stages

    def _after_checkpoint(self, state: TrainerState) -> None:
        """Delete old checkpoints and call the callbacks; ``state`` is that of the checkpoint's step."""
        with name_errors(Path(self.args.output_dir)):
            run_on_first_rank_unwrapped(lambda: self._make_room(state.best_model_checkpoint))
        another = self.control.should_save
        self.control = self.callback_handler.on_save(self.args, state, self.control)
        self.control.should_save = another

    def _make_room(self, best: str | None) -> None:
        output_dir, limit = Path(self.args.output_dir), self.args.save_total_limit
        if self._replaces:
            for path in output_dir_guard.checkpoints_except(output_dir, self._checkpoints.written):
                logger.info("deleting %s (of an earlier round of training)", path)
                self._checkpoints.delete(path)
        else:
            output_dir_guard.set_aside_newer(output_dir, self.started_at_step, self._checkpoints.written)
        for path in directory.checkpoints_to_delete(output_dir, limit, best):
            logger.info("deleting %s (save_total_limit %d)", path, limit)
            self._checkpoints.delete(path)

    def _start_state(self, checkpoint: Path | None) -> LoopState:
        """Set a new `TrainerState`, or that of the checkpoint, and return the loop state."""
        loop_state = LoopState()
        if checkpoint is None:
            self.state = TrainerState(stateful_callbacks=self._exportable())
        else:
            self.state = TrainerState.load_from_json(str(checkpoint / directory.STATE_FILE))
            directory.locate_best(self.state, checkpoint)
            restore_counters(self.callback_handler.callbacks, self.state.stateful_callbacks)
            self._load_callback_state()
            if directory.reset_best_metric(self.state, checkpoint, self.args):
                reset_patience(self.callback_handler.callbacks)
            loop_state = directory.load_loop_state(checkpoint, self.state.global_step)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.control._new_training()
        return loop_state

    def _write_state(self, folder: Path) -> None:
        if self.output_lock is not None:
            self.output_lock.verify()
        states: dict[str, list[JsonObject]] = {}
        for callback in self._exportable():
            states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {
            name: values[0] if len(values) == 1 else values for name, values in states.items()
        }
        self.state.save_to_json(str(folder / directory.STATE_FILE))
        (folder / ARGUMENTS_FILE).write_text(self.args.to_json_string())

    def _training_state(self) -> TrainingState:
        training, place = self._training, self._position
        control = self.control
        # a callback that sets both flags ends a run that may resume there
        early = self.state.global_step < self.state.max_steps
        paused = control.should_training_stop and early and not self.watch.stopped
        ended = place.ended or (control.should_epoch_stop and not paused)
        place = replace(place, ended=bool(ended))
        return TrainingState(training.engine, training.rate, self.ranks, place)

    def _exportable(self) -> list[TrainerCallback | TrainerControl]:
        return [
            cb for cb in [*self.callback_handler.callbacks, self.control] if isinstance(cb, ExportableState)
        ]
