"""What kinds of run share that hold the model to a frozen reference. The model that stands beside is the trainer's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mca_train.config.run_config import Settings


@dataclass(kw_only=True)
class ReferenceArguments:
    """Which model is the reference."""

    reference_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Directory of the reference; None: the initial model (with LoRA: without adapter)."
        },
    )


def no_reference_left(settings: "Settings", own: ReferenceArguments) -> Iterator[str]:
    """That an adapter changes the base model, which was to be the reference."""
    if settings.lora.lora_modules_to_save and own.reference_model_name_or_path is None:
        yield (
            "lora_modules_to_save trains parts of the base model, which is then no reference any more; set "
            "reference_model_name_or_path, or remove it"
        )
