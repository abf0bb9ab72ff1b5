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


def adapter_reference_problems(settings: "Settings", own: ReferenceArguments) -> Iterator[str]:
    """What keeps the model without its adapter, which is to be the reference, from being one."""
    if own.reference_model_name_or_path is not None or not settings.lora.is_enabled:
        return
    from mca_train.losses.preference import adapter_reference_problems

    yield from adapter_reference_problems(settings.training)
    if settings.lora.lora_modules_to_save:
        yield (
            "lora_modules_to_save trains parts of the base model, which is then no reference any more; set "
            "reference_model_name_or_path, or remove it"
        )
