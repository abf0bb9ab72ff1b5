"""Errors for options of LLaMA-Factory that were never compared with its Hugging Face run."""

from typing import NoReturn

from mca_config.errors import McaError
from mca_train.trainer.base import TrainerOptions


def reject(option: str, remedy: str) -> NoReturn:
    """Raise the error for an unsupported ``option``; ``remedy`` tells what to set instead."""
    raise McaError(f"{option} is not supported by the mcore_adapter facade yet; {remedy}")


def reject_dpo() -> NoReturn:
    """Raise the error for LLaMA-Factory's stage dpo."""
    reject("stage: dpo", "use mca-train dpo, or run LLaMA-Factory without USE_MCA")


def reject_unsupported(options: TrainerOptions) -> None:
    """Raise an error for trainer options, and options in LLaMA-Factory's reporting callback, that were never compared.

    LLaMA-Factory's workflow does not pass ``finetuning_type``, ``stage`` and ``packing`` to the trainer.

    Raises:
        McaError: An option is unsupported.
    """
    for callback in options.get("callbacks") or ():
        finetuning, data = (getattr(callback, name, None) for name in ("finetuning_args", "data_args"))
        method, stage = getattr(finetuning, "finetuning_type", "full"), getattr(finetuning, "stage", "sft")
        if method != "full":
            reject(
                f"finetuning_type: {method} (LLaMA-Factory's default is lora)", "set finetuning_type: full"
            )
        if stage != "sft":
            reject(f"stage: {stage}", "use stage: sft, or run LLaMA-Factory without USE_MCA")
        if getattr(data, "packing", None):
            reject("packing", "set packing: false and neat_packing: false, or use mca-train sft")
    args = options.get("args")
    if getattr(args, "sequence_packing", False):
        reject("sequence_packing", "set sequence_packing: false, or use mca-train sft")
    if options.get("eval_dataset") is not None:
        reject("evaluation", "remove eval_dataset and set val_size: 0, or use mca-train sft with eval_file")
    if (checkpoint := getattr(args, "resume_from_checkpoint", None)) is not None:
        reject(
            f"resume_from_checkpoint: {checkpoint}", "set another output_dir, or overwrite_output_dir: true"
        )
