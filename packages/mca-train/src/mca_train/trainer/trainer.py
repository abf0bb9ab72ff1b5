"""``McaTrainer``: Hugging Face's Trainer on the outside, Megatron's engine inside.

Callbacks, ``report_to``, the progress bar, ``TrainerState``, strategies for logging, evaluation and saving, and
``resume_from_checkpoint`` work as in ``transformers.Trainer``. The loop, the optimizer, the data loaders,
evaluation and checkpoints are not Hugging Face's: nothing goes through accelerate. What a step does is in ``engine``,
what is written in ``checkpoint``; this file calls them in order.
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
from mca_config.files import reading
from mca_config.training import TrainingArguments
from mca_train import groups
from mca_train.batching.collate import Collator, PadCollator, pad_token
from mca_train.batching.collator_output import CollatorFormat
from mca_train.batching.image_batch import image_batching
from mca_train.batching.loaders import Loaders, continued
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.position import Length, RunPosition
from mca_train.batching.sampling import StepSampler
from mca_train.batching.step_stream import StepStream, require_steps
from mca_train.checkpoint import directory, lineage
from mca_train.checkpoint.carried import Due, Totals
from mca_train.checkpoint.model import load_weights, require_format, saved_weights
from mca_train.checkpoint.output_dir import require_own
from mca_train.checkpoint.training_state import TrainingState
from mca_train.checkpoint.writer import CheckpointWriter, remove_unfinished
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import Engine, StepResult
from mca_train.engine.part_rates import choose_parts
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import seed_dropout
from mca_train.losses.chunked import chunk_losses
from mca_train.losses.label_smoothing import smooth_labels
from mca_train.losses.token_loss import num_targets, require_sums, token_loss
from mca_train.lr_schedule import LearningRate, schedule_problems
from mca_train.metrics.log_file import JsonlLog
from mca_train.metrics.meter import LossMeter
from mca_train.metrics.signals import Extreme, ModelLosses
from mca_train.trainer.evaluating import WithEvaluation
from mca_train.trainer.expert_biases import tell_moving_biases
from mca_train.trainer.forced_routing import tell_forced_routing
from mca_train.trainer.hf_shims import (
    ModelView,
    WithoutAccelerator,
    require_mca,
    require_optimizable,
    require_unmerged,
    require_vocabulary,
)
from mca_train.trainer.loading import log_plan
from mca_train.trainer.monitor import Watch
from mca_train.trainer.parts import Training
from mca_train.trainer.saving import WithCheckpoints
from mca_train.trainer.unsupported import require_honoured, require_no_upload
from mca_train.trainer.without_effect import tell_without_effect, trains_routers, trains_vocabulary

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.log_probs.vocabulary import TokenValues

logger = logging.getLogger(__name__)


class McaTrainer(WithoutAccelerator, WithEvaluation, WithCheckpoints):
    """Trains `VirtualModels` with Megatron.

    Args:
        model: What ``mca_models.AutoModel`` returns.
        args: ``mca_config.TrainingArguments``.
        data_collator: Makes ``input_ids`` and ``labels`` (not shifted) of a micro-batch's samples; None: pads
            on the right.
        train_dataset: Items have ``input_ids`` and, if not every token is a target, ``labels``. May be a stream
            (``IterableDataset``, ``datasets`` streaming too); then ``max_steps`` must be set.
        eval_dataset: The same, or a dict of several by name.
        processing_class: The tokenizer; saved with the model.
        callbacks: Hugging Face ``TrainerCallback``s.
        collator_format: How batches of ``data_collator`` are read.
        pack_length: With ``sequence_packing``, tokens of a row of packed sequences; None: of the longest sample.

    Override `compute_loss` to train on another loss.

    Attributes:
        signal_names: Names of what `compute_loss` adds to ``signals``; their means are logged beside the loss.
        signal_differences: What is logged too: of two such means the first less the second.
        signal_extremes: What is logged too: the ``smallest`` or ``largest`` number that ``signals`` looked at.
        wants_logits: `compute_loss` gets logits instead of the cross entropy of each token.
        token_values: `compute_loss` gets the log-probability of each token ``[b, s]``, at a temperature, or with the
            entropy ``[2, b, s]``, computed ``loss_chunk_size`` tokens at a time (1024 if that is not set).
        started_at_step: Steps that were done before `train`: 0, or those of the checkpoint it went on from.
    """

    signal_names: tuple[str, ...] = ()
    signal_differences: Mapping[str, tuple[str, str]] = MappingProxyType({})
    signal_extremes: Mapping[str, Extreme] = MappingProxyType({})
    wants_logits: bool = False
    token_values: "TokenValues | None" = None

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
        **others: object,
    ) -> None:
        require_mca(model, args)
        require_honoured(args, others, type(self), McaTrainer)
        require_optimizable(model, args)
        require_vocabulary(model, args, wants_logits=self.wants_logits)
        for problem in schedule_problems(args):
            raise McaError(problem)
        require_steps(train_dataset, args.max_steps)
        require_format(model, args.ckpt_format)
        self.ranks = groups.here(model.config.layout)
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
        choose_parts(model, args)
        self._print_lines()
        rows, moved = args.decoupled_lr is None or trains_vocabulary(model), trains_routers(model)
        tell_without_effect(args, model.config, model.megatron, trains_vocabulary=rows, trains_routers=moved)
        tell_moving_biases(args, model.config, model.megatron, trained=moved)
        tell_forced_routing(model.config, model.megatron)
        seed_dropout(model, args.seed)
        self.model, self.model_wrapped, self._view = model, model, view
        self._checkpoints = CheckpointWriter(in_background=args.async_save)
        self._place, self._totals, self._due = RunPosition(), Totals(), Due()
        self.started_at_step = 0
        self._is_token_loss = type(self).compute_loss is McaTrainer.compute_loss
        self.watch = Watch(args, model, self.ranks)
        self._loaders = Loaders(
            args=args,
            ranks=self.ranks,
            megatron=model.megatron,
            collate=self.data_collator,
            pad_token_id=pad_token(processing_class),
            pack_length=pack_length,
            collator_format=collator_format or CollatorFormat(),
            images=image_batching(model.config, decodes=self.ranks.is_first_stage),
            positions=model.config.max_position_embeddings if model.config.learned_positions else None,
        )
        self._new_meters()
        self._set_output()
        self._pipeline = Pipeline(list(model.chunks), self._loss, wants_logits=self.wants_logits)

    def _new_meters(self) -> None:
        """What is summed up between two logs begins at 0."""
        self._meter = LossMeter(self.ranks.context_parallel_rank)
        self.signals = self._new_signals()
        self._model_losses = ModelLosses(self.model.chunks)
        self._sources = self._losses_of_sources(self.train_dataset)
        self.watch.restore({"skipped": 0})

    def _set_output(self) -> None:
        """What the chunk with the loss makes of its hidden states: another trainer may have changed it."""
        args, model = self.args, self.model
        if self.token_values is not None and args.label_smoothing_factor:
            raise McaError("label_smoothing_factor does nothing for a trainer with token_values; remove it")
        smooth_labels(model.chunks, args.label_smoothing_factor, model.config.vocab_size)
        chunk_losses(
            model.chunks,
            args.loss_chunk_size,
            wants_logits=self.wants_logits,
            values=self.token_values,
            vocab_size=model.config.vocab_size,
        )

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The loss of one micro-batch on a rank of the last pipeline stage.

        Args:
            output: ``[b, s]`` fp32 cross entropy of each token (s: of this context-parallel rank), or, where
                the class sets `wants_logits`, logits ``[b, s, vocab / tp]`` of this tensor-parallel rank.
            batch: Labels (already the next token) and mask.

        Returns:
            The sum over the targets, and their number (or a sum with weights, and that of the weights). The trainer
            divides by the number of the whole global batch, so a loss that is a mean must be multiplied by its number.
        """
        return token_loss(output, batch)

    def num_items(self, batch: MicroBatch) -> Tensor:
        """The number that `compute_loss` returns; to be overridden where that counts something else than targets."""
        return num_targets(batch)

    def before_training(self) -> None:
        """On every rank, when ``output_dir`` is the run's own, before anything is loaded; ranks may agree to stop."""

    def release_first(self) -> None:
        """Lets go of what `before_training` alone needs."""

    def before_forward(self, batch: StepBatch) -> None:
        """Called on every rank with each step's batch, before training or evaluating on it."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: object = None,
    ) -> TrainOutput:
        """Trains; see ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: A checkpoint's path, True for the last one, or ``"auto"`` for the last one if
                there is any.
            trial: Must be None: hyper-parameter search is not supported.
            ignore_keys_for_eval: Not used: evaluation computes no outputs.
        """
        if trial is not None:
            raise McaError("hyper-parameter search is not supported")
        if isinstance(self._pipeline, Engine):
            self._pipeline.require_model()
        require_unmerged(self.model)
        self._set_output()
        output_dir = Path(self.args.output_dir)
        require_own(output_dir, [self.model.source])
        self.is_in_train = True
        try:
            with self._alone():
                with reading(output_dir):
                    checkpoint = directory.find(resume_from_checkpoint, output_dir, self.ranks)
                    self._claim(output_dir, checkpoint)
                with self.watch.pulse, self.watch.signal:
                    self.before_training()
                    return TrainOutput(0, 0.0, {}) if self.watch.stopped else self._train(checkpoint)
        finally:
            self._checkpoints.abandon()
            self.is_in_train = False

    def _train(self, checkpoint: Path | None) -> TrainOutput:
        loader, sampler = self._train_loader()
        with reading(checkpoint or Path(self.args.output_dir)):
            carried = self._start_state(checkpoint)
            place = RunPosition() if checkpoint is None else directory.place_in(checkpoint)
        self._place = continued(place, sampler)
        length = Length.of(self.args, sampler, self._place, self.state.global_step)
        training = self._prepare(length, checkpoint)
        log_plan(self.args, self.ranks, length, sampler.shape.global_size, self.state.global_step)
        if self.ranks.is_first:
            remove_unfinished(Path(self.args.output_dir), directory.PREFIX)
            if self.args.overwrite_output_dir and not self._replaces:
                lineage.remove_others(Path(self.args.output_dir), checkpoint, self.state.global_step)
        start, started = self.state.global_step, time.time()
        self.started_at_step = start
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if checkpoint is not None:
            with reading(checkpoint):
                training.load_rng(checkpoint)
        elif self.args.eval_on_start:
            self._evaluate(None, None, skip_scheduler=True)
        self._new_meters()
        self._take_up(carried)
        if checkpoint is not None:
            left = sampler.steps_after(self._place.samples)
            ended = self._place.ended or not left
            self._catch_up(carried.due, over=ended or start >= length.max_steps)
            self._place = self._place.next_epoch(left) if ended else self._place
        for epoch in range(self._place.epoch, length.num_epochs):
            if self.control.should_training_stop or self.state.global_step >= length.max_steps:
                break
            self._run_epoch(epoch, loader, sampler)
        return self._finish(start, started)

    def _prepare(self, length: Length, checkpoint: Path | None) -> TrainingState:
        """Engine and schedule; restored from ``checkpoint`` if there is one."""
        self._set_length(length)
        if checkpoint is not None:
            with reading(checkpoint):
                self._load_weights(checkpoint)
        engine, rate = self.new_engine(), LearningRate(self.args, length.schedule_steps)
        self._training, self._pipeline = Training(engine, rate), engine
        engine.measured, engine.weighed_by = self.watch.stragglers.forward, []
        self.optimizer, self.lr_scheduler = engine.optimizer, rate.scheduler
        training = self._training_state()
        if checkpoint is not None:
            with reading(checkpoint):
                training.load(checkpoint, saved_weights(self.model, checkpoint))
            rate.move(length.schedule_done - self._place.schedule)
        rate.write_decay(engine.optimizer.param_groups)
        self._place = replace(self._place, schedule=length.schedule_done)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self._view, self.optimizer, self.lr_scheduler
        return training

    def _load_weights(self, directory: Path) -> None:
        load_weights(self.model, directory)
        if isinstance(self._pipeline, Engine):
            self._pipeline.take_weights()

    def new_engine(self) -> Engine:
        """What trains the model on this rank, or that of an earlier `train`, whose chunks are wrapped already."""
        if isinstance(self._pipeline, Engine):
            self._pipeline.take_rates(self.args)
            return self._pipeline
        choose_parts(self.model, self.args)  # another trainer may have chosen others since
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
        left = sampler.steps_after(self._place.samples)
        if epoch != self._place.epoch:
            self._place = self._place.next_epoch(left)
        elif self.args.ignore_data_skip:
            self._place = self._place.begun_anew(sampler.num_steps - left)
        sampler.set_epoch(epoch, self._place.samples)
        self.callback_handler.train_dataloader = loader
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        for batch in self._steps(loader, sampler):
            self._training.rate.write(self.engine.optimizer.param_groups)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self.training_step(batch)
            self.state.global_step += 1
            self._place = self._place.after_step()
            self.state.epoch = epoch + sampler.share(self._place.samples)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._ask_for_log()
            self._due = self.watch.stop_if_asked(self.control, self.state.global_step)
            self._checkpoints.advance()
            self._log_evaluate_save()
            self.watch.pulse.now("reading the batch", self.state.global_step + 1)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if not self.watch.stopped:
            self._end_epoch()

    def training_step(self, batch: StepBatch, *_: object, **__: object) -> StepResult:
        """One optimizer step on one step's batch."""
        engine, rate = self._training.engine, self._training.rate
        step = self.state.global_step + 1
        self.watch.pulse.now("forward and backward", step)
        self.before_forward(batch)
        loss = engine.forward_backward(batch)
        self._model_losses.add_step()
        self._meter.add(loss, batch)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.watch.pulse.now("the optimizer", step)
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
        """The run's own metrics, the best model if asked for, and the last callback."""
        self.watch.pulse.now("finishing", self.state.global_step)
        with self._pipeline.at_rest():
            pass  # the last step's parameters have arrived
        self._checkpoints.finish()
        steps = self.state.global_step - first
        stepwise = self.args.logging_strategy == IntervalStrategy.STEPS
        if steps and stepwise and not self.watch.stopped and self.state.global_step > self._totals.logged:
            self._log_step()  # a callback ended the run; the checkpoint has the interval as an unfinished one
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
