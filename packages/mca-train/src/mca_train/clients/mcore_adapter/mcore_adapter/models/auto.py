"""Models of mca, made as ``mcore_adapter`` makes them: all parts are trained until a caller freezes some."""

from dataclasses import dataclass
from pathlib import Path

import mca_models
from mca_config.arguments import DistributingParallelArguments
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
        return mca_models.AutoModel.from_pretrained(path, args)

    @staticmethod
    def from_config(config: ConfigWithArguments) -> VirtualModels:
        """Return a randomly initialised model of ``config``."""
        return mca_models.AutoModel.from_config(config.config, config.args)
