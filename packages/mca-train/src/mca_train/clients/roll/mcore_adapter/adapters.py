"""LoRA of ROLL: ``peft.get_peft_model`` on a chunk attaches mca's adapter, with Hugging Face's module names."""

from collections.abc import Callable

import peft.mapping_func

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.lora.targets import Target, linear_targets
from mca_train.clients.chunk_lora import ChunkPeftModel
from mca_train.types import Chunk, Upstream

_PeftModel = peft.PeftModel


def _peft_model(model: Upstream, *args: object, **kwargs: object) -> Upstream:
    kind: Upstream = ChunkPeftModel if hasattr(model, "attach_lora") else _PeftModel
    return kind(model, *args, **kwargs)


def apply_megatron_lora() -> None:
    """Make ``peft.get_peft_model`` return a `ChunkPeftModel` for a chunk of mca."""
    peft.mapping_func.PeftModel = _peft_model


def set_linear_is_expert(model: Chunk) -> None:
    """Do nothing: mca knows which linears are experts'."""


def _labels(model: Chunk, selects: Callable[[Target], bool]) -> list[str]:
    config: McaModelConfig = model.mca_config
    return sorted(
        {target.label for target in linear_targets(config) if not target.is_vision and selects(target)}
    )


def find_all_linear_modules(model: Chunk) -> list[str]:
    """Return the names of the Hugging Face modules of all linears, also of experts, but not of the output layer."""
    return _labels(
        model,
        lambda target: (
            (target.linear or target.base.expert is not None) and not target.base.mca.endswith(".gate_weight")
        ),
    )


def find_all_router_modules(model: Chunk) -> list[str]:
    """Return the names of the Hugging Face modules of all routers."""
    return _labels(model, lambda target: target.is_router)


def find_all_embedding_modules(model: Chunk) -> list[str]:
    """Raise the error for embeddings.

    Raises:
        McaError: Always.
    """
    raise McaError(
        "lora_target: all-embedding is not supported by mca; remove it, or name linears or all-linear"
    )
