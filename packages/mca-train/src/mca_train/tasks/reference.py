"""Arguments of the kinds of run with a frozen reference model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mca_train.losses import options

if TYPE_CHECKING:
    from mca_train.config.run_config import Settings


@dataclass(kw_only=True)
class ReferenceArguments:
    """Reference model."""

    reference_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Directory of the reference; None: the initial model (with LoRA: without adapter)."
        },
    )


def adapter_reference_problems(settings: "Settings", arguments: ReferenceArguments) -> Iterator[str]:
    """Yield an error for each setting that excludes the model without its adapter as the reference."""
    if arguments.reference_model_name_or_path is not None or not settings.lora.is_enabled:
        return
    yield from options.adapter_reference_problems(settings.training)
    if settings.lora.lora_modules_to_save:
        yield (
            "lora_modules_to_save trains parts of the base model, which then cannot be the reference; set "
            "reference_model_name_or_path, or remove it"
        )
