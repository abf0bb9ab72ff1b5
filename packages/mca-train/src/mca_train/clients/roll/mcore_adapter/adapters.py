"""Functions for LoRA on single chunks, which mca does not have."""

from typing import NoReturn

from mca_config.errors import McaError
from mca_train.types import Chunk


def _reject() -> NoReturn:
    raise McaError(
        "lora_target is not supported with ROLL's Megatron strategy on mca; remove it, or use mca-train"
    )


def apply_megatron_lora() -> NoReturn:
    """Raise the error for LoRA."""
    _reject()


def set_linear_is_expert(model: Chunk) -> NoReturn:
    """Raise the error for LoRA."""
    _reject()


def find_all_linear_modules(model: Chunk) -> NoReturn:
    """Raise the error for LoRA."""
    _reject()


def find_all_embedding_modules(model: Chunk) -> NoReturn:
    """Raise the error for LoRA."""
    _reject()


def find_all_router_modules(model: Chunk) -> NoReturn:
    """Raise the error for LoRA."""
    _reject()
