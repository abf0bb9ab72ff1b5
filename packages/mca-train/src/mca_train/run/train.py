"""`run` trains from a configuration: it checks the run, starts the ranks, builds the trainer and writes the model.

`rules` has the checks. The kind of run decides the trainer and whether there is a reference model.
"""

import logging
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_config.errors import UsageError, raising_usage_errors
from mca_config.fields import cast
from mca_config.printable import counted
from mca_config.types import Values
from mca_models import AutoModel
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.peft import get_peft_model, load_adapter
from mca_train import groups
from mca_train.checkpoint.output_files import PREFIX, STATE_FILE
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.config.model import launcher_world_size, peft_task
from mca_train.config.model_parts import trained_parts
from mca_train.config.run_config import Settings, has_hub_ids, with_directories
from mca_train.data.scoring import padding_token
from mca_train.launch import environment, failures, launcher
from mca_train.launch.environment import LISTENER, join
from mca_train.launch.launcher import scratch_folder
from mca_train.run.inputs import Inputs, prepare_inputs
from mca_train.run.logs import quiet_libraries, set_log_levels, silent_arguments
from mca_train.run.record import best_step, plot_losses, summary, write_record
from mca_train.run.restarts import StartRecorder, can_restart, resume_values
from mca_train.run.rules import check
from mca_train.run.settings import make_settings
from mca_train.tasks.task import Task
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.distributed.rendezvous import Attempt
    from mca_models.templates.classification_head import Head
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer

logger = logging.getLogger(__name__)


class LastEvaluation(TrainerCallback):  # type: ignore[misc]
    """Callback that evaluates the final model at the end of training, unless it was evaluated.

    mlflow, trackio and others end their runs in ``on_train_end``, and later logs start another run. So this callback
    must be called before theirs.

    Args:
        trainer: The trainer of the model.
    """

    def __init__(self, trainer: "McaTrainer") -> None:
        self._trainer = trainer

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Evaluate unless the run was stopped; after a stop during the evaluation, a resumed run repeats it."""
        if self._trainer.watch.stopped or self._is_done(state):
            return
        if not self._trainer.evaluate_until_signal():
            logger.warning("SIGTERM: the last evaluation is skipped until the run is resumed")
            self._trainer.complete_checkpoint()

    def _is_done(self, state: TrainerState) -> bool:
        best = best_step(self._trainer)
        step = state.global_step if best is None else best
        return any("eval_loss" in log and log["step"] == step for log in state.log_history)


def run(task: Task, values: Values, where: str, command: list[str]) -> int:
    """Train, on new local ranks unless a launcher started this process, and return the exit code.

    Args:
        task: The kind of run.
        values: Keys and values of the configuration.
        where: Their origin for error messages.
        command: Starts this same program, for ranks that cannot be forked (CUDA).
    """
    quiet_libraries(first=environment.is_first())
    with failures.raising_on_signals():
        if not environment.started_by_launcher():
            return _launch(task, values, where, command)

        platform.require_launcher(os.environ)
        folder = os.environ.get("MCA_TRAIN_REPORTS")
        rank = int(os.environ["RANK"])
        return failures.report_failure(
            lambda: _run_launched_rank(task, values, where), Path(folder) if folder else None, rank
        )


def _launch(task: Task, values: Values, where: str, command: list[str]) -> int:
    values = _without_device(values)
    on_the_hub = has_hub_ids(values)
    if on_the_hub:  # check before the download of weights
        check(task, make_settings(task, with_directories(values, only="config"), where)).require()
        values = with_directories(values)
    with silent_arguments() if on_the_hub else nullcontext():
        settings = make_settings(task, values, where)
    set_log_levels(settings.training)
    run = check(task, settings).require()
    ranks = run.world_size
    logger.info("starting %s: %s", counted(ranks, "rank"), run.layout)

    with scratch_folder() as folder:
        if platform.device_type() == "cuda":
            return launcher.spawn_ranks(command, ranks, folder)
        lock = OutputLock(Path(settings.training.output_dir))
        try:
            inputs = prepare_inputs(run, lock)
            import mca_train.trainer.trainer  # noqa: F401  (imported before the fork, so that ranks need not)

            return launcher.fork_ranks(lambda: _run_forked_rank(inputs), ranks, folder)
        finally:
            lock.release()


def _without_device(values: Values) -> Values:
    """Return ``values`` with ``use_cpu`` for the launcher, whose set-up would otherwise use memory of the first GPU.

    Raises:
        UsageError: ``use_cpu`` is set on a machine with a GPU.
    """
    from mca_train.trainer.rules import USE_CPU_WITH_GPU

    if platform.device_type() != "cuda":
        return values
    if cast("use_cpu", values.get("use_cpu", False), bool, words=True):
        raise UsageError(USE_CPU_WITH_GPU)
    return {**values, "use_cpu": True}


def settings_on_rank(task: Task, values: Values, where: str) -> tuple[Settings, "Attempt | None"]:
    """Return the settings on a rank, and the attempt if torchrun can restart the ranks.

    The process group is started first, so that Hugging Face does not start another one. After a restart the settings
    resume from the last checkpoint.
    """
    import torch.distributed as dist

    attempt = None
    if not dist.is_initialized():
        platform.set_device()
        seconds = cast("ddp_timeout", values.get("ddp_timeout", 1800), int, words=True)
        attempt = join(platform.backend(), timedelta(seconds=seconds))
    with silent_arguments() if LISTENER in os.environ else nullcontext():  # the launcher has logged it
        resumed = values if attempt is None else resume_values(values, attempt)
        return make_settings(task, resumed, where), attempt


def _run_launched_rank(task: Task, values: Values, where: str) -> None:
    """Run a rank in a process that a launcher started."""
    values = with_directories(values)  # one rank of each machine downloads, the others wait
    settings, attempt = settings_on_rank(task, values, where)
    run = check(task, settings, launcher_world_size).require()
    lock = OutputLock(Path(settings.training.output_dir))
    with scratch_folder():
        try:
            if hint := _tokenized_cache_hint(settings):
                logger.info("%s", hint)
            _train_rank(prepare_inputs(run, lock), attempt)
        finally:
            lock.release()


def _tokenized_cache_hint(settings: Settings) -> str | None:
    """Return a hint about ``tokenized_cache`` if several ranks of a machine each tokenize all rows."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks == 1 or settings.data.streaming or settings.data.tokenized_cache is not None:
        return None
    return f"each of the {ranks} ranks here tokenizes all rows; with tokenized_cache DIR one rank does it for all"


def _run_forked_rank(inputs: Inputs) -> None:
    """Run a rank in a fork, with new settings because they depend on the process."""
    import torch

    quiet_libraries(first=os.environ["RANK"] == "0")
    torch.set_num_threads(environment.threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    run = inputs.run
    settings, _ = settings_on_rank(run.task, run.settings.values, run.settings.where)
    _train_rank(replace(inputs, run=replace(run, settings=settings)), None)


def _train_rank(inputs: Inputs, attempt: "Attempt | None") -> None:
    set_log_levels(inputs.run.settings.training)
    _train(inputs, attempt)
    parallel.stop()


def _train(inputs: Inputs, attempt: "Attempt | None") -> None:
    args = inputs.run.settings.training
    trainer = make_trainer(inputs)
    if attempt is not None:
        trainer.add_callback(StartRecorder(attempt))
    if inputs.evaluation is not None:
        trainer.callback_handler.callbacks.insert(0, LastEvaluation(trainer))
    trainer.output_lock = inputs.lock
    if trainer.is_world_process_zero():
        write_record(inputs.run)
    result = trainer.train(args.resume_from_checkpoint)
    if trainer.watch.stopped:
        if trainer.is_world_process_zero():
            sys.stdout.write(_stop_message(trainer) + "\n")
        groups.barrier()
        if can_restart():
            sys.exit(128 + signal.SIGTERM)
        return
    logger.info("writing the model to %s", args.output_dir)
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(args.output_dir) / STATE_FILE))
        plot_losses(trainer.state.log_history, Path(args.output_dir))
        sys.stdout.write(summary(trainer, result) + "\n")
    groups.barrier()


def make_trainer(inputs: Inputs) -> "McaTrainer":
    """Return the trainer of a run on this rank; collective."""
    run, settings = inputs.run, inputs.run.settings
    reference, head = None, run.task.head(settings)
    if head is not None:
        head = replace(head, pad_token_id=padding_token(inputs.tokenizer))
    if (path := run.task.reference(settings)) is not None:
        assert run.reference is not None, "it has been read with the run"
        # the reference first, as building a model seeds the random states
        logger.info("loading the reference model, then the trained model")
        reference = _base(settings, path, run.reference.vocab_size, len(inputs.tokenizer))
        reference.requires_grad_(False)
    path = settings.data.model_name_or_path
    model = _base(settings, path, run.model.vocab_size, len(inputs.tokenizer), head)
    if any(getattr(samples, "has_images", False) for samples in (inputs.train, inputs.evaluation)):
        with raising_usage_errors():
            model.require_images()
    options: TrainerOptions = {
        "model": _with_adapter(model, settings),
        "args": settings.training,
        "train_dataset": inputs.train,
        "eval_dataset": inputs.evaluation,
        "processing_class": inputs.tokenizer,
        "pack_length": settings.data.seq_length * run.task.sequences_per_sample,
    }
    with raising_usage_errors():
        return run.task.trainer(settings, reference, options)


def _base(
    settings: Settings, path: str, rows: int, tokens: int, head: "Head | None" = None
) -> "VirtualModels":
    """Load the model at ``path`` with ``head``, and extend its vocabulary from ``rows`` to ``tokens`` if larger."""
    seed = settings.training.seed
    if tokens <= rows:
        return AutoModel.from_pretrained(path, settings.training, seed=seed, head=head)
    logger.info("the vocabulary of %s grows from %d to the tokenizer's %d", path, rows, tokens)
    return AutoModel.from_pretrained(path, settings.training, seed=seed, vocab_size=tokens, head=head)


def _with_adapter(model: "VirtualModels", settings: Settings) -> "VirtualModels":
    lora = settings.lora
    if not lora.is_enabled:
        return model

    with raising_usage_errors():
        if lora.adapter_name_or_path is not None:
            adapted = load_adapter(model, lora.adapter_name_or_path)
        else:
            adapted = get_peft_model(
                model,
                lora.config(peft_task(model.config)),
                seed=settings.training.seed,
                parts=trained_parts(settings.training, model.config),
            )
    logger.info("%s", adapted.print_trainable_parameters())
    return adapted


def _stop_message(trainer: "McaTrainer") -> str:
    """Return the text that tells how to continue a stopped run."""
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if not steps:  # during the reference's forward passes, before the first checkpoint
        return "stopped by SIGTERM before the first step\nstart it again with the same command"
    checkpoint = Path(trainer.args.output_dir) / f"{PREFIX}-{step}"
    return (
        f"stopped by SIGTERM after step {step} of {steps}; complete checkpoint: {checkpoint}\n"
        "continue with --resume_from_checkpoint auto"
    )
