"""`run` takes a configuration file to a trained model, whatever the kind of run, and starts the ranks for it.

It decides the order of things. What is wrong is found in `checks`; model and trainer are made in `build`.
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

from mca_config.errors import UsageError
from mca_config.fields import cast
from mca_config.printable import counted
from mca_config.types import Values
from mca_train.checkpoint.directory import PREFIX, STATE_FILE
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.config.model import given_ranks
from mca_train.config.run_config import Settings, given_values
from mca_train.launch import environment, failures, launcher
from mca_train.launch.rendezvous import LISTENER, join
from mca_train.launch.scratch import scratch_folder
from mca_train.launch.stopping import raising_stopped
from mca_train.metrics.plot import plot_losses
from mca_train.run.checks import check, settings_of
from mca_train.run.hub_paths import named_on_the_hub, with_directories
from mca_train.run.inputs import Inputs, prepare_inputs
from mca_train.run.logs import quiet_libraries, set_log_levels, silent_arguments
from mca_train.run.record import write_record
from mca_train.run.summary import summary
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_models.megatron.distributed.attempts import Attempt
    from mca_train.trainer.trainer import McaTrainer

logger = logging.getLogger(__name__)


def run(task: Task, config: Path | None, overrides: list[str], command: list[str]) -> int:
    """Trains; starts local ranks unless a launcher already did. The exit code.

    Args:
        task: What is trained.
        config: The YAML file; None: the overrides are all.
        overrides: ``--key value`` words.
        command: Starts this same program, for ranks that cannot be forked (CUDA).
    """
    quiet_libraries(first=environment.is_first())
    values, where = given_values(config, overrides)
    with raising_stopped():
        if not environment.started_by_launcher():
            return _launch(task, values, where, command)
        from mca_models.megatron import platform

        platform.require_launcher(os.environ)
        folder = os.environ.get("MCA_TRAIN_REPORTS")
        rank = int(os.environ["RANK"])
        return failures.report_failure(
            lambda: _launched_rank(task, values, where),
            Path(folder) if folder else None,
            rank,
        )


def _launch(task: Task, values: Values, where: str, command: list[str]) -> int:
    values = _without_device(values)
    on_the_hub = named_on_the_hub(values)
    if on_the_hub:  # what is wrong is found before weights are fetched
        check(task, settings_of(task, with_directories(values, only="config"), where)).require()
        values = with_directories(values)
    with silent_arguments() if on_the_hub else nullcontext():
        settings = settings_of(task, values, where)
    set_log_levels(settings.training)
    run = check(task, settings).require()
    ranks = run.world_size
    logger.info("starting %s: %s", counted(ranks, "rank"), run.layout)
    from mca_models.megatron import platform

    with scratch_folder() as folder:
        if platform.device_type() == "cuda":
            return launcher.spawn_ranks(command, ranks, folder)
        lock = OutputLock(Path(settings.training.output_dir))
        try:
            inputs = prepare_inputs(run, lock)
            import mca_train.trainer.trainer  # noqa: F401  (imported before the fork, so that ranks need not)

            return launcher.fork_ranks(lambda: _forked_rank(inputs), ranks, folder)
        finally:
            lock.release()


def _without_device(values: Values) -> Values:
    """``values`` for the process that starts ranks: Hugging Face's set-up would hold memory of the first rank's GPU.

    Raises:
        UsageError: They ask for a CPU themselves.
    """
    from mca_models.megatron import platform
    from mca_train.trainer.unsupported import BESIDE_A_GPU

    if platform.device_type() != "cuda":
        return values
    if cast("use_cpu", values.get("use_cpu", False), bool, words=True):
        raise UsageError(BESIDE_A_GPU)
    return {**values, "use_cpu": True}


def settings_on_rank(task: Task, values: Values, where: str) -> tuple[Settings, "Attempt | None"]:
    """The settings on a rank: its process group stands first, so that Hugging Face starts none of its own.

    Where torchrun has started the ranks anew they say to go on; which attempt it is comes with them.
    """
    import torch.distributed as dist

    from mca_models.megatron import platform
    from mca_train.run.restarts import continued

    attempt = None
    if not dist.is_initialized():
        platform.use_own_device()
        seconds = cast("ddp_timeout", values.get("ddp_timeout", 1800), int, words=True)
        attempt = join(platform.backend(), timedelta(seconds=seconds))
    with silent_arguments() if LISTENER in os.environ else nullcontext():  # the launcher has logged it
        return settings_of(task, continued(values, attempt), where), attempt


def _launched_rank(task: Task, values: Values, where: str) -> None:
    """In a process that a launcher started."""
    values = with_directories(values)  # ranks of a machine wait for the one that downloads
    settings, attempt = settings_on_rank(task, values, where)
    run = check(task, settings, given_ranks).require()
    lock = OutputLock(Path(settings.training.output_dir))
    with scratch_folder():
        try:
            if told := _tokenized_by_each(settings):
                logger.info("%s", told)
            _train_rank(prepare_inputs(run, lock), attempt)
        finally:
            lock.release()


def _tokenized_by_each(settings: Settings) -> str | None:
    """What to say where ranks of a machine that are no forks of one process each make all samples."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks == 1 or settings.data.streaming or settings.data.tokenized_cache is not None:
        return None
    return f"each of the {ranks} ranks here tokenizes all rows; with tokenized_cache DIR one rank does it for all"


def _forked_rank(inputs: Inputs) -> None:
    """In a fork: the settings are made again, as they know their process."""
    import torch

    quiet_libraries(first=os.environ["RANK"] == "0")
    torch.set_num_threads(environment.threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    run = inputs.run
    settings, _ = settings_on_rank(run.task, run.settings.values, run.settings.where)
    _train_rank(replace(inputs, run=replace(run, settings=settings)), None)


def _train_rank(inputs: Inputs, attempt: "Attempt | None") -> None:
    """One rank's whole run, or an attempt at it."""
    from mca_models.megatron.distributed import parallel

    set_log_levels(inputs.run.settings.training)
    with inputs.lock.kept() if os.environ["RANK"] == "0" else nullcontext():
        _train(inputs, attempt)
    parallel.stop()


def _train(inputs: Inputs, attempt: "Attempt | None") -> None:
    from mca_train import groups
    from mca_train.run.build import make_trainer
    from mca_train.run.last_evaluation import LastEvaluation
    from mca_train.run.restarts import NotesStart, is_started_again

    args = inputs.run.settings.training
    trainer = make_trainer(inputs)
    if attempt is not None:
        trainer.add_callback(NotesStart(attempt))
    if inputs.evaluation is not None:
        trainer.callback_handler.callbacks.insert(0, LastEvaluation(trainer))
    trainer.output_lock = inputs.lock
    if trainer.is_world_process_zero():
        write_record(inputs.run)
    result = trainer.train(args.resume_from_checkpoint)
    if trainer.watch.stopped:
        if trainer.is_world_process_zero():
            sys.stdout.write(_stopped(trainer) + "\n")
        groups.barrier()
        if is_started_again():
            sys.exit(128 + signal.SIGTERM)
        return
    logger.info("writing the model to %s", args.output_dir)
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(args.output_dir) / STATE_FILE))
        plot_losses(trainer.state.log_history, Path(args.output_dir))
        sys.stdout.write(summary(trainer, result) + "\n")
    groups.barrier()


def _stopped(trainer: "McaTrainer") -> str:
    """How a run that was asked to stop can be continued."""
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if not steps:  # while the reference was run; what it begins with need not be in its own directory
        return "stopped by SIGTERM before the first step\nstart it again as it was"
    checkpoint = Path(trainer.args.output_dir) / f"{PREFIX}-{step}"
    return (
        f"stopped by SIGTERM after step {step} of {steps}; complete checkpoint: {checkpoint}\n"
        "continue with --resume_from_checkpoint auto"
    )
