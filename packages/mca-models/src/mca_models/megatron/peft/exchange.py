"""Exchange of an adapter: gather it from all ranks, export it or merged weights, receive it as tensors.

Adapters are small: a rank can hold all of one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed
from torch import Tensor

from mca_config.model_config import DtypeName, McaModelConfig
from mca_models.lora import Adapter, AdapterConfig, AdapterRules
from mca_models.lora.peft_directory import PeftReader, PeftTensors, peft_shapes, per_expert_tensors
from mca_models.megatron import platform
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.factory.fill import is_first_replica, shard_rank_and_size
from mca_models.megatron.factory.transformer_config import DTYPES
from mca_models.megatron.peft.attach import Attached
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.state.weight_receiver import Weight, WeightReceiver, receive_all
from mca_models.megatron.tensors import cast_finite, to_numpy, to_torch
from mca_models.weights import Param
from mca_models.weights.arrays import Array

Pieces = dict[str, dict[int, Array]]


def whole_adapter(
    live: Sequence[tuple[Param, Tensor]],
    rank_context: RankContext,
    model: McaModelConfig,
    config: AdapterConfig,
    rules: AdapterRules,
    *,
    everywhere: bool = False,
) -> Adapter | None:
    """Gather the adapter on rank 0, or ``everywhere``; None on other ranks. Collective."""
    mine: Pieces = {}
    for param, tensor in live:
        if is_first_replica(param, rank_context.coordinates):
            rank, _ = shard_rank_and_size(param, rank_context.layout, rank_context.coordinates)
            mine.setdefault(param.mca_name(), {})[rank] = to_numpy(tensor)
    everyone: list[Pieces] | None = [{}] * rank_context.world_size if rank_context.rank == 0 else None
    if everywhere:
        everyone = all_gather(mine)
    else:
        torch.distributed.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return None
    pieces: Pieces = {}
    for part in everyone:
        for name, ranks in part.items():
            pieces.setdefault(name, {}).update(ranks)
    return Adapter(model, config, rules, lambda param: _join(param, pieces[param.mca_name()], model))


def _join(param: Param, pieces: Mapping[int, Array], model: McaModelConfig) -> Array:
    whole = param.shard.join([pieces[rank] for rank in sorted(pieces)])
    return whole[: model.vocab_size] if param.vocab else whole


def peft_tensors(
    adapter: Adapter, dtype: DtypeName | None, *, per_expert: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a PEFT file in its order, on the device, cast to ``dtype`` if given.

    Args:
        adapter: The adapter.
        dtype: Dtype that they are cast to; None: not cast.
        per_expert: Yield the factors of stacked experts expert by expert.
    """
    tensors, device = PeftTensors(adapter), platform.current_device()
    stored = ((name, tensors.array(name)) for name in sorted(tensors.sources))
    for name, array in per_expert_tensors(adapter) if per_expert else stored:
        tensor = to_torch(array).to(device)
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


def receive_adapter(adapter: Adapter, weights: Iterable[Weight]) -> Callable[[Param], Array]:
    """Return a function that reads the full tensor of a rule of ``adapter`` from ``weights``.

    Args:
        adapter: The adapter, whose rules give the expected tensors.
        weights: Names and tensors.

    Raises:
        McaError: Names are missing or unexpected, or a shape differs.
    """
    tensors: dict[str, Tensor] = {}
    receiver = WeightReceiver(peft_shapes(adapter), {})

    def receive(name: str, tensor: Tensor, start: int | None) -> None:
        whole = receiver.receive(name, tensor, start)
        if whole is not None:
            tensors[name] = whole.detach().cpu().clone()

    receive_all(weights, receive)
    receiver.finish()
    stacks = PeftReader(lambda name: to_numpy(tensors[name]), adapter.model.num_experts or 1)
    return stacks.read
