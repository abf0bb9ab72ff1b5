"""Adapter factors of fused projections as mca 0.1.0 wrote them: the rows of one tensor rank after the other.

Now the rows of each projection are a separate tensor, which any number of tensor ranks can read. The old single tensor
is readable only by as many ranks as wrote it.
"""

from collections.abc import Container, Iterable
from pathlib import Path

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.torch_checkpoint.dcp import DcpDirectory
from mca_train.types import OptimizerState

Leaf = tuple[OptimizerState, Typed, OptimizerState]
"""``(container, key, sharded tensor)``."""


def request_legacy_adapter_rows(leaves: Iterable[Leaf], saved: Container[str], folder: Path) -> None:
    """Request the old tensor where ``folder`` has it instead of the separate ones; collective.

    Raises:
        McaError: Another number of tensor ranks wrote it.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    legacy = [(leaf, part) for leaf in leaves if (part := _first_absent(leaf[2], saved)) is not None]
    tensors = DcpDirectory(folder).tensors if legacy else {}
    other_sizes: set[int] = set()
    for (container, key, leaf), part in legacy:
        ranks, rows = part.axis_fragmentations[0], part.local_shape[0]
        writers = len({offset[0] for offset in tensors[leaf.key].blobs})
        other_sizes |= {writers} - {ranks}
        cut = (0, part.global_offset[0] // rows, ranks)
        container[key] = ShardedTensor.from_rank_offsets(leaf.key, leaf.data, cut, replica_id=leaf.replica_id)
    if sizes := sorted(set().union(*all_gather(other_sizes))):
        raise McaError(
            f"{folder}: mca 0.1.0 wrote this optimizer state of adapters on fused projections, which needs the same "
            "number of tensor ranks; resume with tensor_model_parallel_size (of experts "
            f"expert_tensor_parallel_size) {' or '.join(map(str, sizes))}; later checkpoints "
            "resume with any size"
        )


def _first_absent(leaf: OptimizerState, saved: Container[str]) -> OptimizerState:
    """Return the first part of a leaf that ``saved`` has as one tensor; None for other leaves."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not isinstance(leaf, ShardedTensorFactory) or leaf.key not in saved:
        return None
    parts = leaf.build()
    return parts[0] if isinstance(parts, list) and parts[0].key not in saved else None
