"""`Saver` writes the model, and checkpoints to resume from.

``checkpoint`` writes the files, `loop` decides when, and `output_dir` which old ones are kept.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerState

from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.checkpoint import directory, output_files
from mca_train.checkpoint.integrity import ARGUMENTS_FILE, Checksums
from mca_train.checkpoint.loop_state import LoopState
from mca_train.checkpoint.model import ModelWriter
from mca_train.checkpoint.training_state import TrainingState
from mca_train.checkpoint.writer import CheckpointWriter, WriteStage, name_errors
from mca_train.engine.finite import require_finite_weights
from mca_train.trainer.base import HfTrainer, Progress
from mca_train.trainer.hf_shims import reset_patience, restore_counters
from mca_train.trainer.logger import Logger
from mca_train.trainer.model_runner import ModelRunner
from mca_train.trainer.monitor import Watch
from mca_train.trainer.output_dir import OutputDir

if TYPE_CHECKING:
    from mca_models import VirtualModels


class Saver:
    """Saving of a trainer's model and checkpoints; collective like the trainer itself.

    Args:
        hf: The trainer with the callbacks and the arguments.
        model: `VirtualModels`.
        runner: Runs the model.
        log: Logger, whose sums checkpoints hold.
        watch: Monitor of the run.
        output: Directory of the checkpoints.
        checkpoints: Writes the checkpoints.
        progress: Progress of the run.
    """

    def __init__(
        self,
        hf: HfTrainer,
        model: "VirtualModels",
        runner: ModelRunner,
        log: Logger,
        watch: Watch,
        output: OutputDir,
        checkpoints: CheckpointWriter,
        progress: Progress,
    ) -> None:
        self._hf, self._model, self._runner = hf, model, runner
        self._logger, self._watch, self._progress = log, watch, progress
        self._output, self.checkpoints = output, checkpoints

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
        target = self._output.checkpoint_path(current.global_step)
        if current.best_global_step == current.global_step:
            current.best_model_checkpoint = str(target)
        self.checkpoints.finish()
        self._output.set_aside_same_step(target)
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
        self._output.delete_old_checkpoints(state.best_model_checkpoint)
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
        self._output.verify_lock()
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
