"""Gather and reduce-scatter shards of unequal size with gloo's all-to-all, as gloo rejects them otherwise.

With experts sharded over tensor ranks each rank has another number of tokens. NCCL gathers those; gloo needs equal
sizes. Sums over ranks are made in rank order on every rank, so results do not depend on timing.
"""

import inspect
from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream

_GATHER, _REDUCE_SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"


def _needed() -> bool:
    from megatron.core.tensor_parallel import mappings

    return "torch.distributed.all_gather(" in inspect.getsource(getattr(mappings, _GATHER))


def _exchange(x: Tensor, group: ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    torch.distributed.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


def gather(x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Concatenate all ranks' rows; rank i has ``sizes[i]`` of them."""
    count = group.size()
    return _exchange(x.repeat(count, *(1,) * (x.dim() - 1)), group, [x.shape[0]] * count, sizes)


def reduce_scatter(x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Return the sum over ranks of this rank's ``sizes[rank]`` rows of each ``x``."""
    rows = sizes[group.rank()]
    parts = _exchange(x, group, sizes, [rows] * group.size())
    return parts.view(group.size(), rows, *x.shape[1:]).sum(0)


def _apply() -> None:
    from megatron.core.tensor_parallel import mappings

    even = {name: getattr(mappings, name) for name in (_GATHER, _REDUCE_SCATTER)}

    def replacement(name: str, uneven: Upstream) -> Upstream:
        def collective(
            x: Tensor, group: ProcessGroup, sizes: Upstream = None, use_global_buffer: bool = False
        ) -> Upstream:
            if sizes is None or group.size() == 1:
                return even[name](x, group, None, use_global_buffer)
            return uneven(x, group, [int(size) for size in sizes])

        return collective

    setattr(mappings, _GATHER, replacement(_GATHER, gather))
    setattr(mappings, _REDUCE_SCATTER, replacement(_REDUCE_SCATTER, reduce_scatter))


PATCH = Patch(
    name="uneven-collectives",
    why="gloo refuses to gather or reduce-scatter the unequal token counts of experts cut over tensor ranks",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_needed,
    apply=_apply,
)
