"""What a run cannot begin with: files and directories that are not there, keys that another kind of run has."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError, UsageError

if TYPE_CHECKING:
    from mca_train.config.run_config import Settings
    from mca_train.data.load import Kind
from mca_config.checks import require_layout
from mca_config.errors import list_problems
from mca_train.checkpoint.output_dir import require_own
from mca_train.config.model import layout_of, model_config
from mca_train.config.run_config import Settings
from mca_train.data.load import Kind
from mca_train.trainer.unsupported import optimizer_problems

_TIMES = ("runtime", "samples_per_second", "steps_per_second")


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
        from mca_train.trainer.dpo import DpoTrainer

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
    from mca_train.data.files import check_file

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


def checked_model(settings: Settings) -> Any:
    """The architecture of the run, which its layout can hold."""
    config = model_config(settings.data.model_name_or_path)
    require_layout(config, layout_of(settings.training, config))
    return config


def require_runnable(settings: Settings) -> None:
    """Refuses what Megatron, or this machine, would not do with the model, before anything of it is loaded."""
    from mca_models.megatron import platform

    platform.prepare()  # before the next lines import Megatron
    from mca_models.megatron.auto import trained_dtype
    from mca_models.megatron.factory.transformer_config import transformer_config

    args = settings.training
    if error := list_problems(list(optimizer_problems(args)), settings.where):
        raise error
    config = model_config(settings.data.model_name_or_path)
    transformer_config(config, args, layout_of(args, config), trained_dtype(config, args))


def require_place(settings: Settings) -> None:
    """Refuses an ``output_dir`` that is not for a run."""
    output_dir, data = Path(settings.training.output_dir), settings.data
    require_own(
        output_dir,
        (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path),
    )
    if os.environ.get("RANK", "0") == "0":
        require_writable(output_dir)


def require_start(settings: Settings) -> None:
    """Refuses an ``output_dir`` of another run, and a ``resume_from_checkpoint`` that is not there.

    What a checkpoint holds is checked by the ranks together.
    """
    output_dir = Path(settings.training.output_dir)
    from mca_models.megatron import platform

    platform.prepare()  # before the next line imports Megatron
    from mca_train.checkpoint import lineage
    from mca_train.checkpoint.directory import resolve

    args = settings.training
    start = resolve(args.resume_from_checkpoint, output_dir)
    lineage.require_free(output_dir, start, overwrite=args.overwrite_output_dir)
