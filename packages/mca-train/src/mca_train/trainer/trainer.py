"""``McaTrainer``: Hugging Face's Trainer on the outside, Megatron's engine inside.

Callbacks, ``report_to``, the progress bar, ``TrainerState``, strategies for logging, evaluation and saving, and
``resume_from_checkpoint`` work as in ``transformers.Trainer``. The loop, the optimizer, the data loaders,
evaluation and checkpoints are not Hugging Face's: nothing uses accelerate. The trainer owns one part for each of them
and calls them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import TrainOutput

from mca_config.errors import McaError
from mca_config.files import naming_read_errors
from mca_config.training import TrainingArguments
from mca_train import groups
from mca_train.batching.collate import Collator, CollatorFormat, PadCollator, model_options, pad_token
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.checkpoint import directory
from mca_train.checkpoint.output_files import require_usable
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import Engine, StepResult
from mca_train.engine.optimizer import select_trained_parts
from mca_train.engine.rng import seed_dropout
from mca_train.losses.token_loss import num_targets, require_sums, token_loss
from mca_train.metrics.logs import JsonlLog
from mca_train.metrics.meters import MetricAccumulator
from mca_train.trainer.base import HfTrainer, ModelView, Progress
from mca_train.trainer.evaluator import EvaluationStopped, Evaluator
from mca_train.trainer.loaders import Loaders, StepLoaders
from mca_train.trainer.logger import Logger
from mca_train.trainer.loop import Loop
from mca_train.trainer.model_runner import ModelRunner
from mca_train.trainer.monitor import Watch
from mca_train.trainer.rules import (
    RULES,
    Rule,
    TrainerSetup,
    check,
    require_no_upload,
    require_unmerged,
    require_unset,
)
from mca_train.trainer.saver import Saver
from mca_train.trainer.unused_options import warn

if TYPE_CHECKING:
    from mca_models import VirtualModels


class McaTrainer(HfTrainer):
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
        compute_metrics: Not supported, like the parameters after it, which are Hugging Face's; each raises an error
            that names the replacement.

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
        run_kind: Kind of run in its checkpoints; it resumes only from the same kind.
        watch: Monitor of the run.
    """

    _rules: tuple[Rule, ...] = RULES

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
        compute_metrics: object = None,
        preprocess_logits_for_metrics: object = None,
        compute_loss_func: object = None,
        model_init: object = None,
        optimizers: object = None,
        optimizer_cls_and_kwargs: object = None,
        peft_config: object = None,
        tokenizer: object = None,
    ) -> None:
        unsupported = {
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "compute_loss_func": compute_loss_func,
            "model_init": model_init,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "peft_config": peft_config,
            "tokenizer": tokenizer,
        }
        setup = TrainerSetup(
            model=model,
            args=args,
            trainer=self,
            base=McaTrainer,
            parameters=unsupported,
            train_dataset=train_dataset,
        )
        check(setup, self._rules)
        super().__init__(
            groups.current_ranks(model.config.layout),
            ModelView(model.config.hf_config),
            args=args,
            data_collator=data_collator or PadCollator(pad_token(processing_class)),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[JsonlLog(), *(callbacks or [])],
        )
        require_no_upload(self.callback_handler.callbacks)
        select_trained_parts(model, args)
        warn(model, args)
        seed_dropout(model, args.seed)
        self.model = self.model_wrapped = model
        self.watch = Watch(args, model, self.ranks)
        self._assemble(
            self._new_loaders(pad_token(processing_class), pack_length, collator_format or CollatorFormat())
        )

    def _new_loaders(
        self, pad_token_id: int, pack_length: int | None, collator_format: CollatorFormat
    ) -> Loaders:
        return Loaders(
            args=self.args,
            ranks=self.ranks,
            megatron=self.model.megatron,
            collate=self.data_collator,
            pad_token_id=pad_token_id,
            pack_length=pack_length,
            collator_format=collator_format,
            **model_options(self.model, self.ranks, requires_experts=self.requires_routed_experts),
        )

    def _assemble(self, loaders: Loaders) -> None:
        """Build the parts that `train` and `evaluate` call."""
        progress, checkpoints = Progress(), CheckpointWriter(in_background=self.args.async_save)
        self._progress = progress
        self._data = StepLoaders(self, loaders, progress)
        self._logger = Logger(self, checkpoints, progress)
        self._runner = ModelRunner(self, self._loss)
        self._evaluator = Evaluator(self, self._runner, self._data, self._logger)
        self._saver = Saver(self, self._runner, self._logger, checkpoints, progress)
        self._output = self._saver.output
        self._loop = Loop(
            self,
            runner=self._runner,
            data=self._data,
            log=self._logger,
            evaluator=self._evaluator,
            saver=self._saver,
            progress=progress,
        )

    @property
    def is_token_loss(self) -> bool:
        """Return True if the loss is the mean over target tokens."""
        return type(self).compute_loss is McaTrainer.compute_loss

    @property
    def metrics(self) -> MetricAccumulator:
        """Return the accumulator for the custom metrics of `compute_loss`."""
        return self._logger.metrics

    @property
    def started_at_step(self) -> int:
        """Return the steps done before `train`: 0, or those of the checkpoint that it resumed from."""
        return self._progress.started_at_step

    @property
    def engine(self) -> Engine:
        """Return the engine with Megatron's training step.

        Raises:
            McaError: `train` has not started yet.
        """
        return self._runner.training.engine

    @property
    def output_lock(self) -> OutputLock | None:
        """Return the lock of ``output_dir`` if the caller has set it; else `train` takes it."""
        return self._output.lock

    @output_lock.setter
    def output_lock(self, lock: OutputLock | None) -> None:
        self._output.lock = lock

    def new_engine(self) -> Engine:
        """Return a new engine, or that of an earlier `train`."""
        return self._runner.new_engine()

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
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
        require_unset(self)
        self._runner.require_active_engine()
        require_unmerged(self.model)
        self._runner.set_output()
        output_dir = Path(self.args.output_dir)
        require_usable(output_dir, [self.model.source])
        self.is_in_train = True
        try:
            with self._output.locked():
                with naming_read_errors(output_dir):
                    checkpoint = directory.find(resume_from_checkpoint, output_dir, self.ranks)
                    if checkpoint is not None:
                        directory.require_kind(checkpoint, self.run_kind)
                    self._output.claim(checkpoint)
                with self.watch.hang_detector, self.watch.signal:
                    self.before_training()
                    return TrainOutput(0, 0.0, {}) if self.watch.stopped else self._loop.run(checkpoint)
        finally:
            self._saver.checkpoints.abandon()
            self.is_in_train = False

    def training_step(self, batch: StepBatch) -> StepResult:
        """Run one optimizer step on one step's batch."""
        return self._loop.step(batch)

    def evaluate(
        self,
        eval_dataset: Samples | dict[str, Samples] | str | None = None,
        ignore_keys: object = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the mean loss over all targets of ``eval_dataset``, every sample counted once."""
        require_unset(self)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(dataset, dict):
            return self._evaluator.evaluate(dataset, metric_key_prefix)
        metrics: dict[str, float] = {}
        for name, part in dataset.items():
            metrics |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
        return metrics

    def evaluate_until_signal(self) -> bool:
        """Evaluate as `evaluate`; return False if SIGTERM ended the evaluation on all ranks."""
        try:
            with self._evaluator.stopping_on_signal():
                self.evaluate()
        except EvaluationStopped:
            return False
        return True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as an MCA checkpoint, with the tokenizer; all ranks take part.

        Args:
            output_dir: None: the run's own.
        """
        self._saver.save_model(Path(output_dir or self.args.output_dir))

    def complete_checkpoint(self) -> None:
        """Write a complete checkpoint of this step, unless there is one."""
        self._saver.complete_checkpoint()

    def _save_checkpoint(self, model: object = None, trial: object = None) -> None:
        """Write a checkpoint of this step, in place of Hugging Face's."""
        self._saver.save_checkpoint()

    def get_train_dataloader(self) -> DataLoader[StepBatch]:
        """Return this rank's training loader; an item is a step."""
        return self._data.train()[0]

    def get_eval_dataloader(self, eval_dataset: Samples | str | None = None) -> DataLoader[StepBatch]:
        """Return this rank's evaluation loader; an item is a round of micro-batches."""
        return self._data.evaluation(eval_dataset)

    def _add_means(self, values: Mapping[str, Tensor], real: Tensor) -> None:
        """Add custom metrics of sequences, or pairs, where ``real`` is 1; context-parallel ranks share the values."""
        ranks = self.ranks.layout.cp
        sums = {name: (value.detach() * real).sum() / ranks for name, value in values.items()}
        self.metrics.add(sums, real.sum() / ranks)

    def _loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if not self.wants_logits:
            self._logger.add_tokens(output, batch)
        return require_sums(self.compute_loss(output, batch), type(self).__name__)
