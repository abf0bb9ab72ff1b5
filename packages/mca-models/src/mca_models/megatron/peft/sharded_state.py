"""LoRA factors in Megatron's distributed checkpoints, which also give the layout of optimizer state.

Megatron stacks a tensor over layers and experts, which is impossible for adapters with rank patterns, or on some
layers only. So each factor is a separate tensor under its canonical name. If its rows are several segments (``[gate,
up]``), each of which is sharded, every segment is a separate tensor, because one shard does not cover a contiguous
range of rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mca_config.layout import Coordinates
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.factory.fill import shard_rank_and_size
from mca_models.megatron.peft.attach import CHILD
from mca_models.megatron.types import DcpObject, GptModel, ShardedState
from mca_models.weights import Param
from mca_models.weights.arrays import split_ratio

_METHOD = "sharded_state_dict"
Replica = tuple[int, int, int]


def patch_sharded_state(chunk: GptModel, by_tensor: Mapping[int, Param], rank_context: RankContext) -> None:
    """Replace ``sharded_state_dict`` of this one ``chunk``.

    Args:
        chunk: A live ``GPTModel`` with adapters.
        by_tensor: The rules of all factors by ``id`` of their live tensors.
        rank_context: This rank and the layout.
    """
    original = chunk.sharded_state_dict

    def sharded_state_dict(*args: object, **kwargs: object) -> ShardedState:
        prefix = kwargs.get("prefix", args[0] if args else "")
        state = {name: x for name, x in original(*args, **kwargs).items() if f".{CHILD}." not in name}
        for name, tensor in chunk.named_parameters():
            if param := by_tensor.get(id(tensor)):
                state[f"{prefix}{name}"] = _sharded(param, tensor, rank_context)
        return state

    setattr(chunk, _METHOD, sharded_state_dict)


def restore_sharded_state(chunk: torch.nn.Module) -> None:
    """Restore the class's ``sharded_state_dict`` of ``chunk``."""
    vars(chunk).pop(_METHOD, None)


def _sharded(param: Param, tensor: Tensor, rank_context: RankContext) -> DcpObject:
    name, replica = param.mca_name(), _replica(param, rank_context.coordinates, rank_context.layout.cp)
    cut = shard_rank_and_size(param, rank_context.layout, rank_context.coordinates)
    if len(param.shard.segments) == 1:
        return _piece(name, tensor, param, cut, replica)
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def segments(key: str, piece: Tensor, replica_id: Replica, _: object) -> list[DcpObject]:
        rows = split_ratio(piece, 0, param.shard.segments)
        return [_piece(f"{key}.{i}", each, param, cut, replica_id) for i, each in enumerate(rows)]

    return ShardedTensorFactory(name, tensor, segments, torch.cat, replica)


def _piece(name: str, tensor: Tensor, param: Param, cut: tuple[int, int], replica_id: Replica) -> DcpObject:
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(
        name,
        tensor,
        *([] if param.shard.axis is None else [(param.shard.axis, *cut)]),
        replica_id=replica_id,
        allow_shape_mismatch=param.vocab,
    )


def _replica(param: Param, coordinates: Coordinates, cp: int) -> Replica:
    """Return Megatron's replica id of this rank's shard: over pipeline, tensor and data ranks."""
    cut = param.shard.axis is not None
    if param.expert is not None:
        return 0, 0 if cut else coordinates.etp, coordinates.edp
    return 0, 0 if cut else coordinates.tp, coordinates.dp * cp + coordinates.cp
