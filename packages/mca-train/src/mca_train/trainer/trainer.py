"""``McaTrainer``: Hugging Face's Trainer on the outside, Megatron's engine inside.

Callbacks, ``report_to``, the progress bar, ``TrainerState``, strategies for logging, evaluation and saving, and
``resume_from_checkpoint`` work as in ``transformers.Trainer``. The loop, the optimizer, the data loaders,
evaluation and checkpoints are not Hugging Face's: nothing uses accelerate. ``engine`` implements the step and
``checkpoint`` the files; this module calls them in order.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, TrainOutput, speed_metrics

from mca_config.errors import McaError
from mca_config.files import naming_read_errors
from mca_config.training import TrainingArguments
from mca_train import groups
from mca_train.batching.collate import Collator, CollatorFormat, PadCollator, pad_token
from mca_train.batching.image_batch import image_batching
from mca_train.batching.loaders import Loaders, resume_position
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.position import RunLength, RunPosition
from mca_train.batching.routed_experts import ExpertBatching
from mca_train.batching.sampling import StepSampler
from mca_train.batching.step_stream import StepStream, require_steps
from mca_train.checkpoint import directory, output_dir_guard
from mca_train.checkpoint.loop_state import PendingEvents, Totals
from mca_train.checkpoint.model import load_weights, require_format, saved_weights
from mca_train.checkpoint.output_dir import require_usable
from mca_train.checkpoint.training_state import TrainingState
from mca_train.checkpoint.writer import CheckpointWriter, remove_unfinished
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import Engine, StepResult
from mca_train.engine.param_groups import select_trained_parts
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import seed_dropout
from mca_train.losses.chunked import chunk_losses
from mca_train.losses.label_smoothing import smooth_labels
from mca_train.losses.token_loss import num_targets, require_sums, token_loss
from mca_train.lr_schedule import LearningRate, schedule_problems
from mca_train.metrics.log_file import JsonlLog
from mca_train.metrics.meter import LossMeter
from mca_train.metrics.metric_accumulator import AuxLossMeter, Extreme
from mca_train.trainer.base import Training
from mca_train.trainer.dataloaders import log_plan
from mca_train.trainer.evaluation import EvaluationMixin
from mca_train.trainer.hf_shims import (
    DistributedMixin,
    ModelView,
    require_mca,
    require_optimizable,
    require_unmerged,
    require_vocabulary,
)
from mca_train.trainer.moe_warnings import warn_forced_routing, warn_router_bias_step
from mca_train.trainer.monitor import Watch
from mca_train.trainer.saving import CheckpointMixin
from mca_train.trainer.unsupported import reject_unsupported, require_no_upload
from mca_train.trainer.unused_options import trains_routers, trains_vocabulary, warn_unused_options

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.log_probs.vocabulary import TokenValues

logger = logging.getLogger(__name__)


class McaTrainer(DistributedMixin, EvaluationMixin, CheckpointMixin):
    """Trainer of `VirtualModels` with Megatron.

    Args:
        model: Model from ``mca_models.AutoModel``.
        args: ``mca_config.TrainingArguments``.
        data_collator: Builds ``input_ids`` and ``labels`` (not shifted) of a micro-batch's samples; None: pads
            on the right.
        train_dataset: Items have ``input_ids`` and, if not every token is a target, ``labels``. May be a stream
            (``IterableDataset``, ``datasets`` streaming too); then ``max_steps`` must be set.
        eval_dataset: The same, or a dict of several by name.
        processing_class: The tokenizer; saved with the model.
        callbacks: Hugging Face ``TrainerCallback``s.
        collator_format: Format of the batches of ``data_collator``.
        pack_length: With ``sequence_packing``, tokens of a row of packed sequences; None: of the longest sample.

    Override `compute_loss` to train on another loss.

    Attributes:
        metric_names: Names of the custom metrics that `compute_loss` adds to ``metrics``; their means are logged.
        metric_differences: Also logged: the first of two such means minus the second.
        metric_extremes: Also logged: the ``smallest`` or ``largest`` value added with ``metrics.add_extremes``.
        wants_logits: `compute_loss` gets logits instead of the cross entropy of each token.
        token_values: `compute_loss` gets the log-probability of each token ``[b, s]``, at a temperature, or with the
            entropy ``[2, b, s]``, computed ``loss_chunk_size`` tokens at a time (1024 if that is not set).
        requires_routed_experts: Every sample must have ``routed_experts``, ``[tokens, layers, topk]``, which the
            routers take instead of choosing.
        started_at_step: Steps done before `train`: 0, or those of the checkpoint that it resumed from.
    """

    metric_names: tuple[str, ...] = ()
    metric_differences: Mapping[str, tuple[str, str]] = MappingProxyType({})
    metric_extremes: Mapping[str, Extreme] = MappingProxyType({})
    wants_logits: bool = False
    token_values: "TokenValues | None" = None
    requires_routed_experts: bool = False

    def __init__(
        self,
        model: "VirtualModels",
        args: TrainingArguments,
        data_collator: Collator | None = None,
        train_dataset: Samples | None = None,
        eval_dataset: Samples | dict[str, Samples] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        *,
        collator_format: CollatorFormat | None = None,
        pack_length: int | None = None,
        **unsupported: object,
    ) -> None:
        require_mca(model, args)
        reject_unsupported(args, unsupported, type(self), McaTrainer)
        require_optimizable(model, args)
        require_vocabulary(model, args, wants_logits=self.wants_logits)
        for problem in schedule_problems(args):
            raise McaError(problem)
        require_steps(train_dataset, args.max_steps)
        require_format(model, args.ckpt_format)
        self.ranks = groups.current_ranks(model.config.layout)
        view = ModelView(model.config.hf_config)
        super().__init__(
            model=view,
            args=args,
            data_collator=data_collator or PadCollator(pad_token(processing_class)),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[JsonlLog(), *(callbacks or [])],
        )
        require_no_upload(self.callback_handler.callbacks)
        select_trained_parts(model, args)
        self._print_lines()
        vocabulary, moved = args.decoupled_lr is None or trains_vocabulary(model), trains_routers(model)
        trains = {"trains_vocabulary": vocabulary, "trains_routers": moved}
        warn_unused_options(args, model.config, model.megatron, **trains)
        warn_router_bias_step(args, model.config, model.megatron, trained=moved)
        warn_forced_routing(model.config, model.megatron)
        seed_dropout(model, args.seed)
        self.model, self.model_wrapped, self._view = model, model, view
        self._checkpoints = CheckpointWriter(in_background=args.async_save)
        self._position, self._totals, self._pending = RunPosition(), Totals(), PendingEvents()
        self.started_at_step = 0
        self._is_token_loss = type(self).compute_loss is McaTrainer.compute_loss
        self.watch = Watch(args, model, self.ranks)
        self._loaders = self._new_loaders(
            pad_token(processing_class), pack_length, collator_format or CollatorFormat()
        )
        self._new_meters()
        self._set_output()
        self._pipeline = Pipeline(list(model.chunks), self._loss, wants_logits=self.wants_logits)

    def _new_loaders(
        self, pad_token_id: int, pack_length: int | None, collator_format: CollatorFormat
    ) -> Loaders:
        config = self.model.config
        return Loaders(
            args=self.args,
            ranks=self.ranks,
            megatron=self.model.megatron,
            collate=self.data_collator,
            pad_token_id=pad_token_id,
            pack_length=pack_length,
            collator_format=collator_format,
            experts=ExpertBatching(config=config, required=self.requires_routed_experts),
            images=image_batching(config, decodes=self.ranks.is_first_stage),
            positions=config.max_position_embeddings if config.embedding.learned_positions else None,
        )

    def _new_meters(self) -> None:
        """Reset the sums between two logs."""
        self._meter = LossMeter(self.ranks.context_parallel_rank)
        self.metrics = self._new_metrics()
        self._aux_losses = AuxLossMeter(self.model.chunks)
        self._sources = self._new_source_losses(self.train_dataset)
        self.watch.restore({"skipped": 0})

    def _set_output(self) -> None:
        """Set the output of the chunk with the loss, which another trainer may have changed."""
        args, model = self.args, self.model
        if self.token_values is not None and args.label_smoothing_factor:
            raise McaError("label_smoothing_factor is not supported with token_values; remove it")
        smooth_labels(model.chunks, args.label_smoothing_factor, model.config.vocab_size)
        chunk_losses(
            model.chunks,
            args.loss_chunk_size,
            wants_logits=self.wants_logits,
            values=self.token_values,
            vocab_size=model.config.vocab_size,
        )

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """Return the loss of one micro-batch on a rank of the last pipeline stage.

        Args:
            output: ``[b, s]`` fp32 cross entropy of each token (s: of this context-parallel rank), or, where the class
                sets `wants_logits`, logits ``[b, s, vocab / tp]`` of this tensor-parallel rank.
            batch: Labels (already the next token) and mask.

        Returns:
            The sum over the targets, and their count (or a weighted sum, and the sum of the weights). The trainer
            divides by the count of the global batch, so a loss that is a mean must be multiplied by its count.
        """
        return token_loss(output, batch)

    def num_items(self, batch: MicroBatch) -> Tensor:
        """Return the count that `compute_loss` returns; override it if that does not count targets."""
        return num_targets(batch)

    def before_training(self) -> None:
        """Hook on every rank, once ``output_dir`` is locked, before anything is loaded; ranks may agree to stop."""

    def release_first(self) -> None:
        """Release what only `before_training` needs."""

    def before_forward(self, batch: StepBatch) -> None:
        """Hook on every rank with each step's batch, before training or evaluating on it."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: object = None,
    ) -> TrainOutput:
        """Train, as ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: A checkpoint's path, True for the last one, or ``"auto"`` for the last one if there
                is any.
            trial: Must be None: hyper-parameter search is not supported.
            ignore_keys_for_eval: Not used: evaluation computes no outputs.
        """
        if trial is not None:
            raise McaError("hyper-parameter search is not supported")
        if isinstance(self._pipeline, Engine):
            self._pipeline.require_active_engine()
        require_unmerged(self.model)
        self._set_output()
        output_dir = Path(self.args.output_dir)
        require_usable(output_dir, [self.model.source])
        self.is_in_train = True
        try:
            with self._alone():
                with naming_read_errors(output_dir):
                    checkpoint = directory.find(resume_from_checkpoint, output_dir, self.ranks)
                    self._claim(output_dir, checkpoint)
                with self.watch.hang_detector, self.watch.signal:
                    self.before_training()
                    return TrainOutput(0, 0.0, {}) if self.watch.stopped else self._train(checkpoint)
        finally:
            self._checkpoints.abandon()
            self.is_in_train = False

    def _train(self, checkpoint: Path | None) -> TrainOutput:
        loader, sampler = self._train_loader()
        with naming_read_errors(checkpoint or Path(self.args.output_dir)):
            loop_state = self._start_state(checkpoint)
            place = RunPosition() if checkpoint is None else directory.load_position(checkpoint)
        self._position = resume_position(place, sampler)
        length = RunLength.from_arguments(self.args, sampler, self._position, self.state.global_step)
        training = self._prepare(length, checkpoint)
        log_plan(self.args, self.ranks, length, sampler.shape.global_size, self.state.global_step)
        if self.ranks.is_first:
            remove_unfinished(Path(self.args.output_dir), directory.PREFIX)
            if self.args.overwrite_output_dir and not self._replaces:
                output_dir_guard.remove_other_run(
                    Path(self.args.output_dir), checkpoint, self.state.global_step
                )
        start, started = self.state.global_step, time.time()
        self.started_at_step = start
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                training.load_rng(checkpoint)
        elif self.args.eval_on_start:
            self._evaluate(None, None, skip_scheduler=True)
        self._new_meters()
        self._restore_loop_state(loop_state)
        if checkpoint is not None:
            left = sampler.steps_after(self._position.samples)
            ended = self._position.ended or not left
            self._catch_up(loop_state.due, over=ended or start >= length.max_steps)
            self._position = self._position.next_epoch(left) if ended else self._position
        for epoch in range(self._position.epoch, length.num_epochs):
            if self.control.should_training_stop or self.state.global_step >= length.max_steps:
                break
            self._run_epoch(epoch, loader, sampler)
        return self._finish(start, started)

    def _prepare(self, length: RunLength, checkpoint: Path | None) -> TrainingState:
        """Build engine and schedule; restore them from ``checkpoint`` if there is one."""
        self._set_length(length)
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                self._load_weights(checkpoint)
        engine, rate = self.new_engine(), LearningRate(self.args, length.schedule_steps)
        self._training, self._pipeline = Training(engine, rate), engine
        engine.stopwatch, engine.assumed_counts = self.watch.stragglers.forward, []
        self.optimizer, self.lr_scheduler = engine.optimizer, rate.scheduler
        training = self._training_state()
        if checkpoint is not None:
            with naming_read_errors(checkpoint):
                training.load(checkpoint, saved_weights(self.model, checkpoint))
            rate.move(length.schedule_done - self._position.schedule)
        rate.write_decay(engine.optimizer.param_groups)
        self._position = replace(self._position, schedule=length.schedule_done)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self._view, self.optimizer, self.lr_scheduler
        return training

    def _load_weights(self, directory: Path) -> None:
        load_weights(self.model, directory)
        if isinstance(self._pipeline, Engine):
            self._pipeline.reload_main_params()

    def new_engine(self) -> Engine:
        """Return a new engine, or that of an earlier `train`, whose chunks are wrapped already."""
        if isinstance(self._pipeline, Engine):
            self._pipeline.update_learning_rates(self.args)
            return self._pipeline
        select_trained_parts(self.model, self.args)  # another trainer may have selected other parts
        return Engine(
            list(self.model.chunks),
            self.args,
            self._loss,
            wants_logits=self.wants_logits,
            num_items=self.num_items,
        )

    def _run_epoch(
        self, epoch: int, loader: DataLoader[StepBatch], sampler: StepSampler | StepStream
    ) -> None:
        left = sampler.steps_after(self._position.samples)
        if epoch != self._position.epoch:
            self._position = self._position.next_epoch(left)
        elif self.args.ignore_data_skip:
            self._position = self._position.restart_epoch(sampler.num_steps - left)
        sampler.set_epoch(epoch, self._position.samples)
        self.callback_handler.train_dataloader = loader
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        for batch in self._steps(loader, sampler):
            self._training.rate.write(self.engine.optimizer.param_groups)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self.training_step(batch)
            self.state.global_step += 1
            self._position = self._position.after_step()
            self.state.epoch = epoch + sampler.share(self._position.samples)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._request_log()
            self._pending = self.watch.stop_on_signal(self.control, self.state.global_step)
            self._checkpoints.advance()
            self._log_evaluate_save()
            self.watch.hang_detector.enter("reading the batch", self.state.global_step + 1)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if not self.watch.stopped:
            self._end_epoch()

    def training_step(self, batch: StepBatch, *_: object, **__: object) -> StepResult:
        """Run one optimizer step on one step's batch."""
        engine, rate = self._training.engine, self._training.rate
        step = self.state.global_step + 1
        self.watch.hang_detector.enter("forward and backward", step)
        self.before_forward(batch)
        loss = engine.forward_backward(batch)
        self._aux_losses.add_step()
        self._meter.add(loss, batch)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.watch.hang_detector.enter("the optimizer", step)
        result = engine.optimizer_step()
        self._after_update(result, loss, rate.value)
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        if result.updated:
            rate.step()
        return result

    def _loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if self._sources is not None and not self.wants_logits:
            self._sources.add_tokens(output, batch)
        return require_sums(self.compute_loss(output, batch), type(self).__name__)

    def _finish(self, first: int, started: float) -> TrainOutput:
        """Log the run's final metrics, load the best model if requested, and call the last callback."""
        self.watch.hang_detector.enter("finishing", self.state.global_step)
        with self._pipeline.params_gathered():
            pass  # gather the last step's parameters
        self._checkpoints.finish()
        steps = self.state.global_step - first
        stepwise = self.args.logging_strategy == IntervalStrategy.STEPS
        if steps and stepwise and not self.watch.stopped and self.state.global_step > self._totals.logged:
            self._log_step()  # a callback ended the run; its checkpoint has the interval as unfinished
        else:
            self._add_up(self._meter.flush())
        if steps and not self.watch.stopped:
            self._require_trained()
        samples = self._samples
        metrics = speed_metrics("train", started, num_samples=samples, num_steps=steps)
        if self._totals.steps:
            metrics["train_loss"] = self._totals.mean_loss
        self.log(dict(metrics))
        best = self.args.load_best_model_at_end and not self.watch.stopped
        if best and self.state.best_model_checkpoint is not None:
            logger.info("loading the best model, %s", self.state.best_model_checkpoint)
            self._load_weights(Path(self.state.best_model_checkpoint))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, metrics.get("train_loss", 0.0), metrics)
