"""Adapters' factors with the rows of several projections, as mca 0.1.0 wrote them: one rank's rows below the other's.

Now the rows of each projection are a tensor of their own, of which any number of tensor ranks can read theirs. Of that
one tensor only as many ranks as wrote it can.
"""

from collections.abc import Container, Iterable
from pathlib import Path

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.torch_checkpoint.dcp import DcpDirectory
from mca_train.types import OptimizerState

Leaf = tuple[OptimizerState, Typed, OptimizerState]
"""A sharded tensor, what holds it, and under which key."""


def request_legacy_adapter_rows(leaves: Iterable[Leaf], saved: Container[str], folder: Path) -> None:
    """Asks for that tensor where ``folder`` has it instead of its parts; collective.

    Raises:
        McaError: Another number of tensor ranks wrote it.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    found = [(leaf, part) for leaf in leaves if (part := _first_absent(leaf[2], saved)) is not None]
    tensors = DcpDirectory(folder).tensors if found else {}
    others: set[int] = set()
    for (container, key, leaf), part in found:
        ranks, rows = part.axis_fragmentations[0], part.local_shape[0]
        writers = len({offset[0] for offset in tensors[leaf.key].blobs})
        others |= {writers} - {ranks}
        cut = (0, part.global_offset[0] // rows, ranks)
        container[key] = ShardedTensor.from_rank_offsets(leaf.key, leaf.data, cut, replica_id=leaf.replica_id)
    if told := sorted(set().union(*all_gather(others))):
        raise McaError(
            f"{folder}: mca 0.1.0 wrote there what the optimizer knows of adapters on fused projections, which only as "
            "many tensor ranks can read; resume with tensor_model_parallel_size (of experts "
            f"expert_tensor_parallel_size) {' or '.join(map(str, told))}, and with others from the next checkpoint"
        )


def _first_absent(leaf: OptimizerState, saved: Container[str]) -> OptimizerState:
    """The first part of a leaf that ``saved`` has whole and not in parts; None if it is not such a one."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not isinstance(leaf, ShardedTensorFactory) or leaf.key not in saved:
        return None
    parts = leaf.build()
    return parts[0] if isinstance(parts, list) and parts[0].key not in saved else None
