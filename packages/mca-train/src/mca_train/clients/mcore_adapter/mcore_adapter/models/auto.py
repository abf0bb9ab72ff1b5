"""Models of mca, made as ``mcore_adapter`` makes them."""

from dataclasses import dataclass
from pathlib import Path

import mca_models
from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models import VirtualModels
from mca_models.hub import directory_of
from mca_models.opening import open_checkpoint


@dataclass(frozen=True)
class ConfigWithArguments:
    """A model's configuration, and the arguments that a model of it is built with."""

    config: McaModelConfig
    args: DistributingParallelArguments | None


class AutoConfig:
    """Reads configurations."""

    @staticmethod
    def from_pretrained(
        path: str | Path, args: DistributingParallelArguments | None = None
    ) -> ConfigWithArguments:
        """Return the configuration of a Hugging Face or MCA directory."""
        return ConfigWithArguments(open_checkpoint(directory_of(path)).config, args)


class AutoModel:
    """Creates ``VirtualModels``; see ``mca_models.AutoModel``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: DistributingParallelArguments | None = None) -> VirtualModels:
        """Return the model of a Hugging Face or MCA directory."""
        config = AutoConfig.from_pretrained(path, args).config
        if config.vision is not None:
            raise McaError(
                f"{path}: {config.model_type} has a vision model, whose freezing LLaMA-Factory does by names that mca "
                "does not have yet; train it with mca-train sft"
            )
        return mca_models.AutoModel.from_pretrained(path, args)

    @staticmethod
    def from_config(config: ConfigWithArguments) -> VirtualModels:
        """Return a randomly initialised model of ``config``."""
        return mca_models.AutoModel.from_config(config.config, config.args)
