"""Models with the parameter names of ROLL's ``mcore_adapter``."""

import re
from collections.abc import Iterator

import torch

from mca_models.megatron.virtual_models import VirtualModels

_WRAPPERS = re.compile(r"^chunks\.\d+\.(?:(vision_model\.)visual\.)?")
"""Parts of our names that ``mcore_adapter``'s names lack; ``visual`` is in the models of the Qwen families."""


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
