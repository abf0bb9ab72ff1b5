"""``AutoConfig`` and ``AutoModel`` of ``mcore_adapter`` on top of mca."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import mca_models
from mca_config.arguments import DistributingParallelArguments
from mca_config.model_config import McaModelConfig
from mca_models import VirtualModels
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.hub import resolve_directory

__all__ = ["AutoConfig", "AutoModel"]

logger = logging.getLogger(__name__)

_WRAPPERS = re.compile(r"^chunks\.\d+\.(?:(vision_model\.)visual\.)?")
"""Parts of our names that ``mcore_adapter``'s names lack; ``visual`` is in the models of the Qwen families."""


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


def client_name(name: str) -> str:
    """Return the name of a parameter in ``mcore_adapter``, given its name in `VirtualModels`."""
    return _WRAPPERS.sub(r"\1", name)


class ClientModels(VirtualModels):
    """``VirtualModels`` whose parameters have the names of ``mcore_adapter``, without the number of their chunk.

    LLaMA-Factory freezes parameters by prefixes: ``embedding``, ``decoder``, ``output_layer``,
    ``vision_model.blocks``, ``vision_model.patch_embed``, ``vision_model.pos_embed``, ``vision_model.merger``.

    Args:
        base: The model, whose chunks are shared.
    """

    def __init__(self, base: VirtualModels) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(base.__dict__)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and shard of each parameter of this rank."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield prefix + client_name(name), parameter


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
