"""Patches of MoE routers and token dispatchers."""

import functools
import inspect
from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_models.megatron.platform._patch import CPU, EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _router_gemm_name_needed() -> bool:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def _apply_router_gemm_name() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = None


ROUTER_GEMM_NAME = Patch(
    name="router-gemm-name",
    why="the MoE router raises NameError: te_general_gemm without Transformer Engine",
    megatron="<0.17",
    devices=EVERYWHERE,
    needed=_router_gemm_name_needed,
    apply=_apply_router_gemm_name,
)
"""Define ``te_general_gemm`` if Transformer Engine is missing.

megatron-core 0.16.1 imports the name inside a ``try`` and then reads it unconditionally in the router's gating linear,
which raises NameError without Transformer Engine. Later versions set it to None in the ``except``.
"""


def _router_jitter_needed() -> bool:
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.apply_input_jitter
    return "training" not in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply_router_jitter() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.apply_input_jitter

    @functools.wraps(plain)
    def in_training(self: Upstream, input: Tensor) -> Tensor:
        result: Tensor = plain(self, input) if self.training else input
        return result

    TopKRouter.apply_input_jitter = in_training


ROUTER_JITTER = Patch(
    name="router-jitter",
    why="routers multiply their input by noise in evaluation too",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_router_jitter_needed,
    apply=_apply_router_jitter,
)
"""Multiply the routers' input by noise in training only.

``apply_input_jitter`` (``moe_input_jitter_eps``) does not check for training mode. Evaluation losses and
log-probabilities of reference models would be random, and would advance the generator of training.
"""


_DROP = "apply_router_token_dropping"


def _drop_by_position_needed() -> bool:
    from megatron.core.transformer.moe import moe_utils

    plain = getattr(moe_utils, _DROP)
    return "routing_map.int()" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply_drop_by_position() -> None:
    from megatron.core.transformer.moe import moe_utils, router

    plain = getattr(moe_utils, _DROP)

    @functools.wraps(plain)
    def dropping(
        routing_probs: Tensor,
        routing_map: Tensor,
        router_topk: int,
        capacity_factor: float,
        drop_policy: str = "probs",
        pad_to_capacity: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ranked = routing_probs
        if drop_policy == "position":  # the first token ranks highest
            priorities = torch.arange(len(routing_map), 0, -1, dtype=torch.int32, device=routing_map.device)
            ranked, drop_policy = routing_map * priorities.unsqueeze(-1), "probs"
        _, kept = plain(ranked, routing_map, router_topk, capacity_factor, drop_policy, pad_to_capacity)
        return routing_probs * kept, kept

    for module in (moe_utils, router):
        setattr(module, _DROP, dropping)


DROP_BY_POSITION = Patch(
    name="drop-by-position",
    why="moe_token_drop_policy position keeps any tokens of an expert instead of the first ones",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_drop_by_position_needed,
    apply=_apply_drop_by_position,
)
"""Keep the first tokens of experts with a limited capacity for ``moe_token_drop_policy: position``.

``apply_router_token_dropping`` takes the topk of a mask of ones and zeros, whose ones are all equal: which tokens are
kept is up to torch's ``topk``, and on a CPU it is mostly the last ones.
"""


def _split_sizes_needed() -> bool:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.zeros(1, dtype=torch.int64), as_numpy=True)
    return isinstance(moved, torch.Tensor)


def maybe_move_tensor_to_cpu(
    tensor: Upstream, as_numpy: bool = False, record_stream: bool = False
) -> Upstream:
    """Return ``tensor``, or its NumPy view."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _apply_split_sizes() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


SPLIT_SIZES = Patch(
    name="split-sizes",
    why="all_to_all_single refuses the alltoall dispatcher's split sizes, which stay CPU tensors",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_split_sizes_needed,
    apply=_apply_split_sizes,
)
"""Convert the all-to-all dispatcher's split sizes to integers on the CPU too.

Megatron converts them to NumPy with ``maybe_move_tensor_to_cpu``, which acts on CUDA tensors only. A CPU tensor stays a
tensor, which ``all_to_all_single`` rejects.
"""


_GATHER, _REDUCE_SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"


def _uneven_collectives_needed() -> bool:
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


def _apply_uneven_collectives() -> None:
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


UNEVEN_COLLECTIVES = Patch(
    name="uneven-collectives",
    why="gloo refuses to gather or reduce-scatter the unequal token counts of experts cut over tensor ranks",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_uneven_collectives_needed,
    apply=_apply_uneven_collectives,
)
"""Gather and reduce-scatter shards of unequal size with gloo's all-to-all, as gloo rejects them otherwise.

With experts sharded over tensor ranks each rank has another number of tokens. NCCL gathers those; gloo needs equal
sizes. Sums over ranks are made in rank order on every rank, so results do not depend on timing.
"""
