"""Export of a model with an adapter: the adapter in PEFT's format, or merged weights.

Ranks and buckets are in `mca_models.megatron.state`.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mca_config.model_config import DtypeName
from mca_models.lora import Adapter
from mca_models.lora.peft_directory import PeftTensors
from mca_models.megatron import platform
from mca_models.megatron.factory.execution import DTYPES
from mca_models.megatron.peft.attach import Attached
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.tensors import cast_finite, to_torch


def peft_tensors(adapter: Adapter, dtype: DtypeName | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a PEFT file in its order, on the device, cast to ``dtype`` if given."""
    tensors, device = PeftTensors(adapter), platform.current_device()
    for name in sorted(tensors.sources):
        tensor = to_torch(tensors.array(name)).to(device)
        yield name, tensor if dtype is None else cast_finite(tensor, DTYPES[dtype], name)


def merged_piece(live: Mapping[str, Tensor], attached: Sequence[Attached]) -> Piece:
    """Return a function that computes this rank's shards with the adapter merged in, on demand.

    Args:
        live: This rank's shards by canonical name.
        attached: The adapter on them.
    """
    adapters = {id(item.base): item for item in attached}

    @torch.no_grad()
    def piece(name: str) -> Tensor | None:
        weight = live.get(name)
        item = adapters.get(id(weight))
        return weight if item is None else item.folded()

    return piece
