"""Models with the parameter names of ROLL's ``mcore_adapter``."""

import re
from collections.abc import Iterator

import torch

from mca_models.megatron.virtual_models import VirtualModels

_CHUNK = re.compile(r"^chunks\.\d+\.")


class ClientModels(VirtualModels):
    """``VirtualModels`` whose parameters have Megatron's names, without the number of their chunk.

    LLaMA-Factory freezes parameters by prefixes such as ``decoder`` and ``vision_model.blocks``.

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
            yield prefix + _CHUNK.sub("", name), parameter
