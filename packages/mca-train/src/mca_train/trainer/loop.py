"""`Loop` runs the epochs and steps of ``train``, and after each step what the callbacks request.

``engine`` implements the step; this module calls the parts of the trainer in order.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path

from torch.utils.data import DataLoader
from transformers.trainer_utils import IntervalStrategy, TrainOutput, speed_metrics

from mca_config.files import naming_read_errors
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.position import RunLength, RunPosition
from mca_train.batching.sampling import StepSampler, StepStream
from mca_train.checkpoint import directory
from mca_train.checkpoint.model import saved_weights
from mca_train.checkpoint.training_state import PendingEvents, TrainingState
from mca_train.engine.engine import StepResult
from mca_train.engine.rng import has_dropout
from mca_train.trainer.base import HfTrainer, Progress, is_early_stopped, name_missing_metric
from mca_train.trainer.evaluator import EvaluationStopped, Evaluator
from mca_train.trainer.loaders import StepLoaders, log_plan, resume_position
from mca_train.trainer.logger import Logger
from mca_train.trainer.model_runner import ModelRunner
from mca_train.trainer.monitor import save_and_stop
from mca_train.trainer.saver import Saver

logger = logging.getLogger(__name__)


class Loop:
    """Training loop of a trainer; collective like the trainer itself.

    Args:
        hf: The trainer.
        runner: Runs and trains the model.
        data: The trainer's loaders.
        log: Logger.
        evaluator: Evaluates the model.
        saver: Saves checkpoints.
        progress: Progress of the run.
    """

    def __init__(
        self,
        hf: HfTrainer,
        *,
        runner: ModelRunner,
        data: StepLoaders,
        log: Logger,
        evaluator: Evaluator,
        saver: Saver,
        progress: Progress,
    ) -> None:
        self._hf, self._model, self._runner, self._watch = hf, hf.model, runner, hf.watch
        self._data, self._logger, self._evaluator, self._saver = data, log, evaluator, saver
        self._progress = progress

    def run(self, checkpoint: Path | None) -> TrainOutput:
        """Train from the start, or from ``checkpoint``, to the end of the run."""
        hf, progress = self._hf, self._progress
        loader, sampler = self._data.train()
        hf.callback_handler.train_dataloader = loader
        with naming_read_errors(checkpoint or Path(hf.args.output_dir)):
            loop_state = self._saver.load_state(checkpoint)
            position = RunPosition() if checkpoint is None else directory.load_position(checkpoint)
        progress.position = resume_position(position, sampler)
        length = RunLength.from_arguments(hf.args, sampler, progress.position, hf.state.global_step)
        training = self._prepare(length, checkpoint)
        log_plan(hf.args, hf.ranks, length, sampler.shape.global_size, hf.state.global_step)
        self._saver.output.remove_leftovers(checkpoint)
        first_step, start_time = hf.state.global_step, time.time()
        progress.started_at_step = first_step
        hf.fire("on_train_begin")
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                training.load_rng(checkpoint, drops=has_dropout(self._model))
        elif hf.args.eval_on_start:
            hf._evaluate(None, None, skip_scheduler=True)
        self._logger.reset()
        self._logger.restore(loop_state)
        first_epoch = progress.position.epoch
        if checkpoint is not None:
            epoch_ended = progress.position.epoch_ended or not sampler.steps_after(progress.position.samples)
            self._catch_up(loop_state.pending, over=epoch_ended or first_step >= length.max_steps)
            first_epoch += epoch_ended
        for epoch in range(first_epoch, length.num_epochs):
            if hf.control.should_training_stop or hf.state.global_step >= length.max_steps:
                break
            self._enter_epoch(epoch, sampler)
            self._run_epoch(epoch, loader, sampler)
        return self._finish(first_step, start_time)

    def _prepare(self, length: RunLength, checkpoint: Path | None) -> TrainingState:
        """Build engine and schedule; restore them from ``checkpoint`` if there is one."""
        hf, progress = self._hf, self._progress
        hf.set_length(length)
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                self._runner.load_weights(checkpoint)
        running = self._runner.start(length.schedule_steps)
        engine, rate = running.engine, running.rate
        engine.stopwatch, engine.assumed_counts = self._watch.stragglers.forward, []
        training = self._saver.training_state()
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                training.load(checkpoint, saved_weights(self._model, checkpoint))
            rate.move(length.schedule_done - progress.position.schedule_steps)
        rate.write_decay(engine.optimizer.param_groups)
        progress.position = replace(progress.position, schedule_steps=length.schedule_done)
        hf.set_optimizer(engine.optimizer, rate.scheduler)
        return training

    def _enter_epoch(self, epoch: int, sampler: StepSampler | StepStream) -> None:
        """Move the position into ``epoch``: the next one, or the one that the run resumes within."""
        progress = self._progress
        steps_left = sampler.steps_after(progress.position.samples)
        if epoch != progress.position.epoch:
            progress.position = progress.position.next_epoch(steps_left)
        elif self._hf.args.ignore_data_skip:
            progress.position = progress.position.restart_epoch(sampler.num_steps - steps_left)

    def _run_epoch(
        self, epoch: int, loader: DataLoader[StepBatch], sampler: StepSampler | StepStream
    ) -> None:
        """Run the steps of ``epoch`` from the position on, with the events after each, and its end."""
        hf, progress = self._hf, self._progress
        training = self._runner.training
        sampler.set_epoch(epoch, progress.position.samples)
        self._data.loaders.seed_workers(loader, epoch, progress.position.samples)
        hf.fire("on_epoch_begin")
        for batch in self._data.steps(loader, sampler):
            training.rate.write(training.engine.optimizer.param_groups)
            hf.fire("on_step_begin")
            hf.training_step(batch)
            hf.state.global_step += 1
            progress.position = progress.position.after_step()
            hf.state.epoch = epoch + sampler.share(progress.position.samples)
            hf.fire("on_step_end")
            self._request_log()
            progress.pending = self._watch.stop_on_signal(hf.control, hf.state.global_step)
            self._saver.checkpoints.advance()
            self._log_evaluate_save()
            self._watch.hang_detector.enter("reading the batch", hf.state.global_step + 1)
            if hf.control.should_epoch_stop or hf.control.should_training_stop:
                break
        if not self._watch.stopped:
            self._end_epoch()

    def step(self, batch: StepBatch) -> StepResult:
        """Run one optimizer step on one step's batch."""
        hf, training, watch = self._hf, self._runner.training, self._watch
        number = hf.state.global_step + 1
        watch.hang_detector.enter("forward and backward", number)
        hf.before_forward(batch)
        loss = training.engine.forward_backward(batch)
        self._logger.add_step(loss, batch)
        hf.fire("on_pre_optimizer_step")
        watch.hang_detector.enter("the optimizer", number)
        result = training.engine.optimizer_step()
        self._logger.end_step(result, loss, training.rate.value, training.engine)
        hf.fire("on_optimizer_step")
        if result.updated:
            training.rate.step()
        return result

    def _request_log(self) -> None:
        """Log the first and the last step of a run, if steps are logged at all."""
        hf = self._hf
        is_end = hf.state.global_step in (1, hf.state.max_steps)
        if is_end and hf.args.logging_strategy == IntervalStrategy.STEPS:
            hf.control.should_log = True

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save as the callbacks requested."""
        hf, step = self._hf, self._hf.state.global_step
        if hf.control.should_log and step > self._progress.totals.logged:
            self._logger.log_step(self._runner.training.engine)
        new_steps = step > self._progress.started_at_step
        if hf.control.should_training_stop and new_steps and not self._watch.stopped:
            self._logger.require_updates()  # before anything is saved or reported as the result
        if hf.control.should_evaluate:
            self._evaluate_or_put_off()
        if hf.control.should_save:
            self._watch.hang_detector.enter("saving", step)
            with self._logger.meter.pause(), self._saver.checkpoints.finishing_on_error():
                hf._save_checkpoint(self._model, None)  # users override it
            hf.control.should_save = False

    def _evaluate_or_put_off(self) -> None:
        """Evaluate and decide whether to save; after SIGTERM the evaluation is repeated on resume."""
        hf = self._hf
        logged = len(hf.state.log_history)
        try:
            with self._evaluator.stopping_on_signal(), name_missing_metric(hf.args):
                with self._logger.meter.pause():
                    metrics = hf._evaluate(None, None)
                best = hf._determine_best_metric(metrics=metrics, trial=None)
        except EvaluationStopped:
            del hf.state.log_history[logged:]
            pending = replace(self._progress.pending, evaluation=True)
            self._progress.pending = save_and_stop(hf.control, hf.state.global_step, pending)
        else:
            if hf.args.save_strategy == "best":
                hf.control.should_save = best

    def _end_epoch(self) -> None:
        self._progress.pending = PendingEvents()
        self._hf.fire("on_epoch_end")
        self._log_evaluate_save()

    def _catch_up(self, due: PendingEvents, *, over: bool) -> None:
        """Run the pending events of the checkpoint that the run resumes from.

        Args:
            due: The pending events.
            over: The epoch or the run ended with that step.
        """
        hf = self._hf
        self._progress.pending = PendingEvents(end_of_epoch=due.end_of_epoch)
        hf.control.should_log = False
        hf.control.should_evaluate, hf.control.should_save = due.evaluation, due.save
        self._log_evaluate_save()
        if is_early_stopped(hf.callback_handler.callbacks):
            logger.info(
                "early stopping ended the run at step %d; a larger patience continues it",
                hf.state.global_step,
            )
            hf.control.should_training_stop = True
        if due.end_of_epoch and (over or hf.control.should_training_stop) and not self._watch.stopped:
            self._end_epoch()

    def _finish(self, first_step: int, start_time: float) -> TrainOutput:
        """Log the run's final metrics, load the best model if requested, and call the last callback."""
        hf, engine, totals = self._hf, self._runner.training.engine, self._progress.totals
        self._watch.hang_detector.enter("finishing", hf.state.global_step)
        with engine.params_gathered():
            pass  # gather the last step's parameters
        self._saver.checkpoints.finish()
        steps, stopped = hf.state.global_step - first_step, self._watch.stopped
        stepwise = hf.args.logging_strategy == IntervalStrategy.STEPS
        if steps and stepwise and not stopped and hf.state.global_step > totals.logged:
            # a callback ended the run; its checkpoint has the interval as unfinished
            self._logger.log_step(engine)
        else:
            self._logger.add_up(self._logger.meter.flush(), engine)
        if steps and not stopped:
            self._logger.require_trained()
        metrics = speed_metrics("train", start_time, num_samples=self._progress.samples, num_steps=steps)
        if totals.steps:
            metrics["train_loss"] = totals.mean_loss
        hf.log(dict(metrics))
        best = hf.args.load_best_model_at_end and not stopped
        if best and hf.state.best_model_checkpoint is not None:
            logger.info("loading the best model, %s", hf.state.best_model_checkpoint)
            self._runner.load_weights(Path(hf.state.best_model_checkpoint))
        hf.fire("on_train_end")
        return TrainOutput(hf.state.global_step, metrics.get("train_loss", 0.0), metrics)
