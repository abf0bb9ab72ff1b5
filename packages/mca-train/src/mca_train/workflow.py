"""``mca-train pretrain``, ``sft`` and ``dpo``: from a configuration file to a trained model."""

import logging
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from mca_config.checks import positions_exceeded, require_layout
from mca_config.errors import UsageError, checking_usage, list_problems
from mca_train import launch
from mca_train.data import Kind, load_tokenized
from mca_train.honoured import optimizer_problems
from mca_train.output_lock import OutputLock
from mca_train.output_place import require_own
from mca_train.rendezvous import join
from mca_train.scratch import scratch_folder
from mca_train.sense import require_run, require_writable, speak
from mca_train.settings import (
    Settings,
    given_values,
    layout_of,
    model_config,
    num_local_ranks,
    parse,
    require_keys_of,
)
from mca_train.stopping import raising_stopped
from mca_train.summary import best_step, summary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Inputs:
    """What ranks share: made once before they are forked."""

    kind: Kind
    settings: Settings
    tokenizer: Any
    train: Any
    evaluation: Any
    lock: OutputLock


def run(kind: Kind, config: Path, overrides: list[str], command: list[str]) -> int:
    """Trains; starts local ranks unless a launcher already did. The exit code.

    Args:
        kind: What the samples are made of.
        config: The YAML file.
        overrides: ``--key value`` words.
        command: Starts this same program, for ranks that cannot be forked (CUDA).
    """
    _quiet(first=os.environ.get("RANK", "0") == "0")
    values, where = given_values(config, overrides)
    with raising_stopped():
        if not launch.started_by_launcher():
            return _launch(kind, values, where, command)
        folder = os.environ.get("MCA_TRAIN_REPORTS")
        rank = int(os.environ["RANK"])
        return launch.report_failure(
            lambda: _launched_rank(kind, values, where),
            Path(folder) if folder else None,
            rank,
        )


def _launch(kind: Kind, values: dict[str, Any], where: str, command: list[str]) -> int:
    settings = parse(values, where)
    with checking_usage():
        require_keys_of(kind, values)
        require_run(kind, settings)
        speak(settings.training)
        layout = layout_of(settings.training, _checked_model(settings))
        ranks = num_local_ranks(settings.launch, layout)
    logger.info("starting %d rank%s: %s", ranks, "s" if ranks > 1 else "", layout)
    from mca_models.megatron import platform

    with scratch_folder() as folder:
        if platform.device_type() == "cuda":
            return launch.spawn_ranks(command, ranks, folder)
        lock = OutputLock(Path(settings.training.output_dir))
        try:
            inputs = _prepare(kind, settings, lock)
            platform.prepare()
            import mca_train.trainer  # noqa: F401  (imported before the fork, so that ranks need not)

            return launch.fork_ranks(lambda: _forked_rank(inputs), ranks, folder)
        finally:
            lock.release()


def parse_on_rank(values: dict[str, Any], where: str) -> Settings:
    """The settings on a rank: its process group stands first, so that Hugging Face starts none of its own."""
    import torch.distributed as dist

    from mca_models.megatron import platform

    if not dist.is_initialized():
        if platform.device_type() == "cuda":
            import torch

            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        timeout = timedelta(seconds=float(values.get("ddp_timeout", 1800)))
        join(platform.backend(), timeout)
    return parse(values, where)


def _launched_rank(kind: Kind, values: dict[str, Any], where: str) -> None:
    """In a process that a launcher started."""
    settings = parse_on_rank(values, where)
    lock = OutputLock(Path(settings.training.output_dir))
    with scratch_folder():
        try:
            _train_rank(_prepare(kind, settings, lock))
        finally:
            lock.release()


def _forked_rank(inputs: _Inputs) -> None:
    """In a fork: the settings are made again, as they know their process."""
    import torch

    _quiet(first=os.environ["RANK"] == "0")
    torch.set_num_threads(launch.threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    settings = parse_on_rank(inputs.settings.values, inputs.settings.where)
    _train_rank(replace(inputs, settings=settings))


def _checked_model(settings: Settings) -> Any:
    config = model_config(settings.data.model_name_or_path)
    require_layout(config, layout_of(settings.training, config))
    return config


def _prepare(kind: Kind, settings: Settings, lock: OutputLock) -> _Inputs:
    """The lock of ``output_dir``, tokenizer and data."""
    with checking_usage():
        require_run(kind, settings)
        _require_place(settings)
        _require_runnable(settings)
    if os.environ.get("RANK", "0") == "0":
        lock.take()
    with lock.kept():
        return _read(kind, settings, lock)


def _read(kind: Kind, settings: Settings, lock: OutputLock) -> _Inputs:
    with checking_usage():
        _require_start(settings)
        tokenizer = load_tokenizer(settings)
    logger.info("reading %s", ", ".join(settings.data.train_file))
    train = _training_data(kind, settings, tokenizer)
    longest = settings.data.seq_length if settings.data.streaming else int(train.lengths.max())
    told = positions_exceeded(model_config(settings.data.model_name_or_path), longest)
    if told:
        logger.warning("seq_length %d: %s", settings.data.seq_length, told)
    evaluation = None
    if settings.data.eval_file:
        evaluation = load_tokenized(kind, settings.data.eval_file, tokenizer, settings.data, evaluation=True)
    return _Inputs(kind, settings, tokenizer, train, evaluation, lock)


def _require_runnable(settings: Settings) -> None:
    """Refuses what Megatron, or this machine, would not do with the model, before anything of it is loaded."""
    from mca_models.megatron import platform

    platform.prepare()  # before the next lines import Megatron
    from mca_models.megatron.auto import trained_dtype
    from mca_models.megatron.build.transformer_config import transformer_config

    args = settings.training
    if error := list_problems(list(optimizer_problems(args)), settings.where):
        raise error
    config = model_config(settings.data.model_name_or_path)
    transformer_config(config, args, layout_of(args, config), trained_dtype(config, args))


def _require_place(settings: Settings) -> None:
    """Refuses an ``output_dir`` that is not for a run."""
    output_dir, data = Path(settings.training.output_dir), settings.data
    require_own(
        output_dir,
        (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path),
    )
    if os.environ.get("RANK", "0") == "0":
        require_writable(output_dir)


def _require_start(settings: Settings) -> None:
    """Refuses an ``output_dir`` of another run, and a ``resume_from_checkpoint`` that is not there.

    What a checkpoint holds is checked by the ranks together.
    """
    output_dir = Path(settings.training.output_dir)
    from mca_models.megatron import platform

    platform.prepare()  # before the next line imports Megatron
    from mca_train import lineage
    from mca_train.checkpointing import resolve

    args = settings.training
    start = resolve(args.resume_from_checkpoint, output_dir)
    lineage.require_free(output_dir, start, overwrite=args.overwrite_output_dir)


def _training_data(kind: Kind, settings: Settings, tokenizer: Any) -> Any:
    files = settings.data.train_file
    if settings.data.streaming:
        from mca_train.streams import load_stream

        args = settings.training
        seed = args.seed if args.data_seed is None else args.data_seed
        in_order = str(args.train_sampling_strategy) == "sequential"
        return load_stream(kind, files, tokenizer, settings.data, seed=None if in_order else seed)
    train = load_tokenized(kind, files, tokenizer, settings.data)
    logger.info("%d training samples of %d tokens", len(train), int(train.lengths.sum()))
    return train


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer that the settings name.

    Raises:
        UsageError: There is none.
    """
    from transformers import AutoTokenizer

    path = settings.data.tokenizer_name_or_path or settings.data.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"no tokenizer in {path} (set tokenizer_name_or_path): {reason}") from error


def _train_rank(inputs: _Inputs) -> None:
    """One rank's whole run."""
    from mca_models.megatron import platform

    speak(inputs.settings.training)
    with inputs.lock.kept() if os.environ["RANK"] == "0" else nullcontext():
        _train(inputs)
    platform.close()


def _train(inputs: _Inputs) -> None:
    from mca_train import groups
    from mca_train.kinds import make_trainer

    args = inputs.settings.training
    trainer = make_trainer(inputs.kind, inputs.settings, inputs.tokenizer, inputs.train, inputs.evaluation)
    trainer.output_lock = inputs.lock
    result = trainer.train(args.resume_from_checkpoint)
    if trainer.watch.stopped:
        if trainer.is_world_process_zero():
            sys.stdout.write(_stopped(trainer) + "\n")
        groups.barrier()
        return
    if inputs.evaluation is not None and not _evaluated(trainer):
        trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(args.output_dir) / "trainer_state.json"))
        sys.stdout.write(summary(trainer, result) + "\n")
    groups.barrier()


def _evaluated(trainer: Any) -> bool:
    """Whether the model that the run ends with was evaluated."""
    best, state = best_step(trainer), trainer.state
    step = state.global_step if best is None else best
    return any("eval_loss" in log and log["step"] == step for log in state.log_history)


def _stopped(trainer: Any) -> str:
    """Where a run that was told to stop can go on."""
    step = trainer.state.global_step
    return (
        f"stopped by SIGTERM after step {step} of {trainer.state.max_steps}; complete checkpoint: "
        f"{Path(trainer.args.output_dir) / f'checkpoint-{step}'}\ncontinue with --resume_from_checkpoint auto"
    )


def _quiet(*, first: bool) -> None:
    """One voice: rank 0 logs what this project says; the libraries only warn, and not about themselves."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(logging.INFO if first else logging.ERROR)
    warnings.filterwarnings("ignore")
