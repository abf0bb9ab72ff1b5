"""Attributes of parameters that Megatron reads: tensor-parallel sharding, vocabulary rows, gradient sums of experts.

The norm of all gradients counts a parameter once: a sharded one on every tensor rank, a replicated one on the first.
Megatron sets these attributes while it initialises weights. Weights that are filled from a checkpoint instead
(``perform_initialization`` off) lack them before megatron-core 0.18, and the norm, and with it clipping, silently
misses all ranks but the first. Transformer Engine also marks the replicated down-projections of MLA as sharded, which
would count once on every tensor rank. megatron-core 0.19 reverts that, but leaves ``partition_dim``, by which Muon
gathers shards.

Vocabulary rows have their own learning rate (``decoupled_lr``). The copy of the embedding for MTP layers on another
pipeline rank is not marked in 0.16: its rows would diverge from those of the first rank.

The gradients of experts are summed over the ranks with the same experts. Before 0.19 megatron-core marks them so
(``allreduce`` false) with expert parallelism only, and sums over the dense parameters' replicas otherwise: wrong if the
expert tensor size is not the tensor size.
"""

from collections.abc import Iterable

from torch import Tensor

from mca_config.layout import ParallelLayout
from mca_models.megatron.names import LocalParam
from mca_models.megatron.types import MarkedParameter


def set_parameter_attributes(params: Iterable[tuple[LocalParam, Tensor]], layout: ParallelLayout) -> int:
    """Set missing or wrong attributes; return how many were set.

    Args:
        params: Every parameter of this rank with its rule (``VirtualModels.local_params()``).
        layout: The parallel sizes.
    """
    separate = layout.ep > 1 or layout.etp != layout.tp
    marked = 0
    for item, tensor in params:
        param: MarkedParameter = tensor
        if item.param.vocab:
            param.is_embedding_or_output_parameter = True
        axis, expert = item.param.shard.axis, item.param.expert is not None
        cut = (axis is not None, -1 if axis is None else axis)
        if cut != (getattr(param, "tensor_model_parallel", False), getattr(param, "partition_dim", -1)):
            param.tensor_model_parallel, param.partition_dim = cut
            param.partition_stride = 1
            marked += 1
        if expert and getattr(param, "allreduce", True) == separate:
            param.allreduce = not separate
            marked += 1
    return marked
