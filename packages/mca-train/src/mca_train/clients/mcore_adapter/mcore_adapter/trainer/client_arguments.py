"""Arguments of LLaMA-Factory that its workflow does not hand to the trainer, read from its reporting callback."""

from collections.abc import Iterable

from transformers import TrainerCallback

from mca_config.errors import McaError


def require_full_finetuning(callbacks: Iterable[TrainerCallback] | None) -> None:
    """Refuse ``finetuning_type`` other than full, which LLaMA-Factory's workflow would ignore.

    Raises:
        McaError: Another type is asked for; LLaMA-Factory's default is lora.
    """
    for callback in callbacks or ():
        kind = getattr(getattr(callback, "finetuning_args", None), "finetuning_type", "full")
        if kind != "full":
            raise McaError(
                f"finetuning_type is {kind} (LLaMA-Factory's default is lora); its USE_MCA workflow only trains all "
                "weights: set finetuning_type to full"
            )
