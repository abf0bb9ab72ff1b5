"""``AutoConfig`` and ``AutoModel`` of ``mcore_adapter`` on top of mca."""

from pathlib import Path
from typing import NoReturn

import mca_models
from mca_config.arguments import DistributingParallelArguments
from mca_models import VirtualModels
from mca_train.clients.unsupported import reject, reject_dpo


class AutoConfig:
    """Configuration that LLaMA-Factory reads only for the reference model of stage dpo."""

    @staticmethod
    def from_pretrained(path: str | Path, args: DistributingParallelArguments | None = None) -> NoReturn:
        """Raise the error for stage dpo."""
        reject_dpo()


class AutoModel:
    """Factory of ``VirtualModels``; see ``mca_models.AutoModel``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: DistributingParallelArguments | None = None) -> VirtualModels:
        """Return the model of a Hugging Face or MCA directory."""
        model = mca_models.AutoModel.from_pretrained(path, args)
        if model.config.vision is not None:
            reject(f"{path}: a {model.config.model_type} model with images", "use mca-train sft")
        return model
