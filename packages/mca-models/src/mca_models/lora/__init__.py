"""LoRA adapters without torch: PEFT directories, MCA adapter directories, and merging.

    adapter = open_adapter(path, model)           # PEFT's or MCA's, complete or an McaError
    write_mca_adapter(adapter, layout, target)    # cut for parallel ranks
    write_peft(adapter, target)                   # for transformers and peft
    merge_to_hf(open_checkpoint(base), adapter, target)

The names of tensors are in ``rules``, what is refused in ``config``.
"""

from pathlib import Path

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.lora.adapter import Adapter
from mca_models.lora.config import AdapterConfig
from mca_models.lora.mca_directory import is_mca_adapter, open_mca_adapter, relaid, write_mca_adapter
from mca_models.lora.merge import Merge, merge_to_hf
from mca_models.lora.peft_directory import is_peft, open_peft, write_peft
from mca_models.lora.rules import AdapterRules, Factors, rules_for_training
from mca_models.lora.targets import Target

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterRules",
    "Factors",
    "Merge",
    "Target",
    "is_adapter",
    "is_mca_adapter",
    "is_peft",
    "merge_to_hf",
    "open_adapter",
    "open_mca_adapter",
    "open_peft",
    "relaid",
    "rules_for_training",
    "write_mca_adapter",
    "write_peft",
]


def is_adapter(path: Path) -> bool:
    """Whether ``path`` looks like an adapter directory, PEFT's or MCA's."""
    return is_peft(path) or is_mca_adapter(path)


def open_adapter(path: Path, model: McaModelConfig | None = None) -> Adapter:
    """The adapter in ``path``, PEFT's or MCA's.

    Args:
        path: The directory.
        model: The base model, which a PEFT directory does not describe; an MCA adapter must be of its
            architecture if given.

    Raises:
        McaError: It is damaged, cannot be represented, or belongs to another model.
    """
    if not is_mca_adapter(path):
        if model is None:
            raise McaError(
                f"{path}: a PEFT adapter does not describe its base model; name the base model too"
            )
        return open_peft(path, model)
    adapter = open_mca_adapter(path)
    for field in ("model_type", "num_layers", "hidden_size", "num_attention_heads", "num_moe_experts"):
        if model is not None and getattr(adapter.model, field) != getattr(model, field):
            raise McaError(
                f"{path}: {field} of its base model is {getattr(adapter.model, field)}, here {getattr(model, field)}"
            )
    return adapter
