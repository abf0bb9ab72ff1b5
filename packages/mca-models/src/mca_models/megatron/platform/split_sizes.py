"""Convert the all-to-all dispatcher's split sizes to integers on the CPU too.

Megatron converts them to NumPy with ``maybe_move_tensor_to_cpu``, which acts on CUDA tensors only. A CPU tensor stays a
tensor, which ``all_to_all_single`` rejects.
"""

import torch

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream


def _needed() -> bool:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.zeros(1, dtype=torch.int64), as_numpy=True)
    return isinstance(moved, torch.Tensor)


def maybe_move_tensor_to_cpu(
    tensor: Upstream, as_numpy: bool = False, record_stream: bool = False
) -> Upstream:
    """Return ``tensor``, or its NumPy view."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _apply() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


PATCH = Patch(
    name="split-sizes",
    why="all_to_all_single refuses the alltoall dispatcher's split sizes, which stay CPU tensors",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_needed,
    apply=_apply,
)
