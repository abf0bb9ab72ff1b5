"""Tells Megatron which parameters are cut over tensor ranks.

The norm of all gradients counts a parameter once: a cut one on every tensor rank, a replicated one on the first.
Megatron marks cut weights while it initialises them; weights that are filled from a checkpoint instead
(``perform_initialization`` off) stay unmarked in megatron-core 0.16, and the norm, and with it clipping, silently
misses all ranks but the first. 0.19 marks them in both cases; then nothing is left to do here.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mca_models.megatron.names import Held


def mark_cut_parameters(held: Iterable[tuple[Held, Tensor]]) -> int:
    """Marks what is missing; returns how many there were.

    Args:
        held: Every parameter of this rank with its rule (``VirtualModels.held()``). Experts' weights are always
            marked: what they are cut or copied over is the expert group's affair.
    """
    marked = 0
    for item, tensor in held:
        param: Any = tensor
        cut = item.param.shard.axis is not None or item.param.expert is not None
        if cut and not getattr(param, "tensor_model_parallel", False):
            param.tensor_model_parallel = True
            param.partition_dim = item.param.shard.axis or 0
            param.partition_stride = 1
            marked += 1
    return marked
