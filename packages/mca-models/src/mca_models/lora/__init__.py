"""LoRA adapters without torch: PEFT directories, MCA adapter directories, and merging.

    adapter = open_adapter(path, model)           # PEFT's or MCA's, complete or an McaError
    write_mca_adapter(adapter, layout, target)    # cut for parallel ranks
    write_peft(adapter, target)                   # for transformers and peft
    MergedSource(open_checkpoint(base), adapter)   # the merged model, as any other checkpoint

The names of tensors are in ``rules``, what is refused in ``config``. LoRA on live models, with torch, is
`mca_models.megatron.peft`.
"""

from mca_models.lora.adapter import Adapter
from mca_models.lora.config import AdapterConfig
from mca_models.lora.convert import (
    adapter_for,
    cast_adapter,
    convert_adapter,
    load_adapter_rules,
    open_adapter,
)
from mca_models.lora.mca_directory import (
    is_mca_adapter,
    open_mca_adapter,
    plan_adapter,
    with_layout,
    write_mca_adapter,
)
from mca_models.lora.merge import MergedSource
from mca_models.lora.peft_directory import PeftTensors, open_peft, write_peft
from mca_models.lora.rules import AdapterRules, LoraFactors, rules_for_training
from mca_models.lora.targets import Target

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterRules",
    "LoraFactors",
    "MergedSource",
    "PeftTensors",
    "Target",
    "adapter_for",
    "cast_adapter",
    "convert_adapter",
    "is_mca_adapter",
    "load_adapter_rules",
    "open_adapter",
    "open_mca_adapter",
    "open_peft",
    "plan_adapter",
    "rules_for_training",
    "with_layout",
    "write_mca_adapter",
    "write_peft",
]
