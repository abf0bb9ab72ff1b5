"""LoRA on live models: ``peft``'s configurations and directories, Megatron's parallel linears.

    models = get_peft_model(AutoModel.from_pretrained(path, args), LoraConfig(target_modules=["q_proj"]))
    models.save_pretrained(dir)            # MCA adapter
    models.save_pretrained_as_hf(dir)      # PEFT adapter
    models = load_adapter(AutoModel.from_pretrained(path, args), dir)

``merge_adapter`` and ``unmerge_adapter`` merge it into the weights and undo that.
"""

from mca_models.megatron.peft.create import attach_adapter, get_peft_model, load_adapter
from mca_models.megatron.peft.models import PeftModels

__all__ = ["PeftModels", "attach_adapter", "get_peft_model", "load_adapter"]
