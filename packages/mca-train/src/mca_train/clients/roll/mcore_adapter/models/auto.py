"""``AutoModel`` of ``mcore_adapter`` on top of mca."""

from pathlib import Path
from typing import TYPE_CHECKING

import mca_models

from .model_factory import VirtualModels
from .router_replay import enable_router_replay

if TYPE_CHECKING:
    from mca_train.clients.roll.mcore_adapter.training_args import TrainingArguments


class AutoModel:
    """Factory of ``VirtualModels``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: "TrainingArguments") -> VirtualModels:
        """Return the model of a Hugging Face, MCA or Megatron directory; collective."""
        args.require_supported()
        models = VirtualModels(mca_models.AutoModel.from_pretrained(path, args), args.seed)
        if args.moe_enable_routing_replay:
            enable_router_replay(models.model)
        return models
