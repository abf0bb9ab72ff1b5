"""``AutoConfig`` and ``AutoModel`` of ``mcore_adapter`` on top of mca."""

import logging
from dataclasses import dataclass
from pathlib import Path

import mca_models
from mca_config.arguments import DistributingParallelArguments
from mca_config.model_config import McaModelConfig
from mca_models import VirtualModels
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.hub import resolve_directory
from mca_train.clients.models import ClientModels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoConfig:
    """Configuration of a model and of its layout.

    Args:
        model: Configuration of the model.
        args: Layout and computation.
    """

    model: McaModelConfig
    args: DistributingParallelArguments | None

    @staticmethod
    def from_pretrained(path: str | Path, args: DistributingParallelArguments | None = None) -> "AutoConfig":
        """Return the configuration of a Hugging Face or MCA directory."""
        config = open_checkpoint(resolve_directory(path)).config
        if args is not None and args.apply_rope_fusion and config.mrope is not None:
            logger.warning("apply_rope_fusion has no effect: images have three positions, it has one")
            args.apply_rope_fusion = None
        return AutoConfig(config, args)


class AutoModel:
    """Factory of ``VirtualModels``; see ``mca_models.AutoModel``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: DistributingParallelArguments | None = None) -> VirtualModels:
        """Return the model of a Hugging Face or MCA directory."""
        args = AutoConfig.from_pretrained(path, args).args
        return ClientModels(mca_models.AutoModel.from_pretrained(path, args))

    @staticmethod
    def from_config(config: AutoConfig) -> VirtualModels:
        """Return a randomly initialised model."""
        return ClientModels(mca_models.AutoModel.from_config(config.model, config.args))
