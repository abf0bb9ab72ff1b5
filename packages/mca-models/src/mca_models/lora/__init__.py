"""LoRA adapters without torch: PEFT directories, MCA adapter directories, and merging.

    adapter = open_adapter(path, model)           # PEFT's or MCA's, complete or an McaError
    write_mca_adapter(adapter, layout, target)    # cut for parallel ranks
    write_peft(adapter, target)                   # for transformers and peft
    MergedSource(open_checkpoint(base), adapter)   # the merged model, as any other checkpoint

The names of tensors are in ``rules``, what is refused in ``config``.
"""

from mca_models.lora.adapter import Adapter
from mca_models.lora.config import AdapterConfig
from mca_models.lora.convert import (
    adapter_for,
    casted,
    convert_adapter,
    is_adapter,
    model_of,
    open_adapter,
    rules_of,
)
from mca_models.lora.mca_directory import is_mca_adapter, open_mca_adapter, planned, relaid, write_mca_adapter
from mca_models.lora.merge import MergedSource, merge_to_hf
from mca_models.lora.peft_directory import PeftTensors, is_peft, open_peft, write_peft
from mca_models.lora.rules import AdapterRules, Factors, rules_for_training
from mca_models.lora.targets import Target

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterRules",
    "Factors",
    "MergedSource",
    "PeftTensors",
    "Target",
    "adapter_for",
    "casted",
    "convert_adapter",
    "is_adapter",
    "is_mca_adapter",
    "is_peft",
    "merge_to_hf",
    "model_of",
    "open_adapter",
    "open_mca_adapter",
    "open_peft",
    "planned",
    "relaid",
    "rules_for_training",
    "rules_of",
    "write_mca_adapter",
    "write_peft",
]
