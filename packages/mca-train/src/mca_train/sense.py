"""Keys of a run that contradict one another: told before a model or a file is read."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError, UsageError

if TYPE_CHECKING:
    from mca_train.data import Kind
    from mca_train.settings import Settings

_STEPS = 1000  # of a schedule that is only tried
_TIMES = ("runtime", "samples_per_second", "steps_per_second")


def contradictions(values: dict[str, Any], training: Any, data: Any) -> Iterator[str]:
    """What is wrong with a run whatever it trains.

    Args:
        values: As given.
        training: Training arguments.
        data: Model and files.
    """
    if data.streaming and training.max_steps <= 0:
        yield "streaming needs max_steps: a stream has no length"
    if values.get("do_train", True) is not True and not training.do_train:
        yield "do_train is false, but mca-train trains; remove it"
    if values.get("do_eval", True) is not True and not training.do_eval and data.eval_file:
        yield "do_eval is false, but eval_file is set, which is evaluated at the end; remove one of the two"
    if not data.eval_file:
        yield from _without_evaluation(values, training)
    if training.load_best_model_at_end and training.eval_strategy == "no":
        yield "load_best_model_at_end is true, but eval_strategy is no: no model is the best; set it or remove the key"
    yield from schedule_problems(training)


def _without_evaluation(values: dict[str, Any], training: Any) -> Iterator[str]:
    asked = {
        f"eval_strategy is {training.eval_strategy.value}": training.eval_strategy != "no",
        "eval_on_start is true": training.eval_on_start,
        "do_eval is true": "do_eval" in values and training.do_eval and training.eval_strategy == "no",
    }
    yield from (
        f"{what}, but eval_file is not set; set it or remove {what.split()[0]}"
        for what, on in asked.items()
        if on
    )


def schedule_problems(training: Any) -> Iterator[str]:
    """Builds the schedule once: Hugging Face tells what its ``lr_scheduler_kwargs`` lack in many ways."""
    from mca_train.schedule import LearningRate

    try:
        LearningRate(training, training.max_steps if training.max_steps > 0 else _STEPS)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        name, given = training.lr_scheduler_type.value, training.lr_scheduler_kwargs or {}
        yield f"lr_scheduler_type {name} with lr_scheduler_kwargs {given}: {' '.join(str(error).split())}"


def require_backend(given: Any) -> None:
    """Refuses a ``ddp_backend`` that is not what ranks of this machine talk over.

    Raises:
        McaError: It is another.
    """
    from mca_models.megatron import platform

    usual = platform.backend()
    if given not in (None, usual):
        raise McaError(f"ddp_backend is {given!r}; ranks of this machine talk over {usual}; remove it")


def require_run(kind: "Kind", settings: "Settings") -> None:
    """Refuses what ``kind`` cannot begin with.

    Raises:
        McaError: A file or a directory that it reads is not there.
        UsageError: There are no training files, or the best model is chosen by a number that is not computed.
    """
    data = settings.data
    if not data.train_file:
        raise UsageError(f"{settings.where}: train_file is not set")
    if kind == "dpo":
        _require_pairs(settings)
    _require_there(settings)
    metric = (settings.training.metric_for_best_model or "loss").removeprefix("eval_")
    known: tuple[str, ...] = ("loss", *_TIMES)
    if metric not in known and kind == "dpo":
        from mca_models.megatron import platform

        platform.prepare()  # before the next line imports Megatron
        from mca_train.dpo import DpoTrainer

        known += DpoTrainer.signal_names
    if metric not in known:
        raise UsageError(
            f"metric_for_best_model is {metric!r}; mca-train {kind} evaluates {', '.join(known)}"
        )


def _require_pairs(settings: "Settings") -> None:
    dpo, lora = settings.dpo, settings.lora
    if settings.training.label_smoothing_factor:
        raise UsageError("label_smoothing_factor is not for preference pairs; use dpo_label_smoothing")
    if lora.lora_modules_to_save and dpo.dpo_loss != "orpo" and dpo.reference_model_name_or_path is None:
        raise UsageError(
            "lora_modules_to_save trains parts of the base model, which then is no reference; set "
            "reference_model_name_or_path, or remove it"
        )


def _require_there(settings: "Settings") -> None:
    from mca_train.reading import check_file

    data = settings.data
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        for file in files:
            check_file(Path(file), key)
    for holder, key in (
        (settings.lora, "adapter_name_or_path"),
        (settings.dpo, "reference_model_name_or_path"),
    ):
        path = getattr(holder, key)
        if path is not None and not Path(path).is_dir():
            raise McaError(f"{key}: directory {path} does not exist")


def require_writable(folder: Path) -> None:
    """Tries ``output_dir`` before anything is read; what was made for that is taken away again.

    Raises:
        McaError: Nothing can be written there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise McaError(
            f"output_dir: {folder} cannot be written ({reason}); name another directory"
        ) from error
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def speak(training: Any) -> None:
    """Sets what this project says to ``log_level``, on ranks but the first to ``log_level_replica``, where asked."""
    from transformers.training_args import trainer_log_levels

    first = os.environ.get("RANK", "0") == "0"
    level = training.log_level if first else training.log_level_replica
    if level == ("passive" if first else "warning"):
        return
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(trainer_log_levels[level] if level != "passive" else logging.INFO)
