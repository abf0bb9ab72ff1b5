"""``AutoModel`` of ``mcore_adapter`` on top of mca."""

from pathlib import Path
from typing import TYPE_CHECKING

import mca_models

from .model_factory import VirtualModels

if TYPE_CHECKING:
    from mca_train.clients.roll.mcore_adapter.training_args import TrainingArguments


class AutoModel:
    """Factory of ``VirtualModels``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: "TrainingArguments") -> VirtualModels:
        """Return the model of a Hugging Face, MCA or Megatron directory; collective."""
        args.require_supported()
        return VirtualModels(mca_models.AutoModel.from_pretrained(path, args))
