"""Parallel layouts of tests, by short names such as ``tp2pp2vpp2``."""

import re
from typing import Any

from mca_config.arguments import DistributingParallelArguments
from mca_config.layout import SIZE_FIELDS


def arguments(name: str, **settings: Any) -> DistributingParallelArguments:
    """Return the arguments of layout ``name``; it may end with ``sp`` (sequence parallelism) or ``allgather``."""
    sizes = {SIZE_FIELDS["tp"]: 1, SIZE_FIELDS["pp"]: 1}
    sizes |= {
        SIZE_FIELDS[axis]: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name) if axis != "dp"
    }
    sequence_parallel = True if name.endswith("sp") else None
    if name.endswith("allgather"):
        settings["moe_token_dispatcher_type"] = "allgather"
    return DistributingParallelArguments(**sizes, sequence_parallel=sequence_parallel, **settings)


def world_size(name: str) -> int:
    """Return the ranks that layout ``name`` needs: the larger of tp x pp x cp x dp and ep x etp x pp."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name)}
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    dense = tp * pp * sizes.get("cp", 1) * sizes.get("dp", 1)
    return max(dense, sizes.get("ep", 1) * sizes.get("etp", tp if "ep" in sizes else 1) * pp)
