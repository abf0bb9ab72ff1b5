"""Process groups: torch.distributed from the environment, Megatron's from a layout.

Only this module reads the launcher's environment, and Megatron's global parallel state for all higher modules. Layers
and patches, which are below it, ask Megatron for their groups. `LiveModel` is a model on these ranks.
"""

import logging
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.errors import McaError
from mca_config.layout import Coordinates, ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_models.megatron.distributed import rendezvous
from mca_models.megatron.names import LocalParam
from mca_models.megatron.types import GptModel, MegatronConfig

_log = logging.getLogger(__name__)
_RANK, _WORLD_SIZE = "RANK", "WORLD_SIZE"
_TIMEOUT = timedelta(minutes=30)
_FEW = 256  # ranks; gloo connects each rank with all ranks of its groups

_SEEDS_OF_A_RANK = 2**20
"""Above every offset that Megatron adds to a seed: 2718 + tp, and 1024 + 100 ep + etp."""


@dataclass(frozen=True)
class RankContext:
    """Layout, rank and coordinates of this process.

    Args:
        layout: The parallel sizes of all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        coordinates: This rank's coordinates in the grid.
    """

    layout: ParallelLayout
    rank: int
    world_size: int
    coordinates: Coordinates

    @property
    def grid(self) -> RankGrid:
        """Grid of all ranks' coordinates."""
        return RankGrid(self.layout, self.world_size)


@dataclass(frozen=True)
class _Groups:
    """Megatron's groups, and one embedding group for each set of pipeline ranks that models use.

    Args:
        pipeline: This rank's pipeline group, which identifies one initialization of Megatron's groups.
        embedding: This rank's embedding group by pipeline ranks; None if this rank is not in it.
    """

    pipeline: ProcessGroup
    embedding: dict[tuple[int, ...], ProcessGroup | None]


_started: list[_Groups] = []
"""The groups that were started last; empty before the first start."""


def start(
    layout: ParallelLayout, seed: int = 1234, *, embedding_ranks: tuple[int, ...] | None = None
) -> RankContext:
    """Start torch.distributed and Megatron's groups for ``layout``, as far as they are missing.

    Without a launcher's environment the world is this one process. Existing groups of the same sizes are reused. Groups
    of another layout are replaced, and models that were built on them cannot be used any more.

    Args:
        layout: The parallel sizes.
        seed: Seed of Megatron's random states.
        embedding_ranks: Pipeline ranks that share the gradient of the embedding; None: first and last.

    Raises:
        McaError: The layout does not fit the number of ranks.
    """
    platform.prepare()
    _start_torch()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world_size > _FEW:
        _allow_connections()
    rank_context = RankContext(layout, rank, world_size, RankGrid(layout, world_size).coordinates(rank))
    _start_megatron(rank_context, tuple(sorted({*(embedding_ranks or (0, layout.pp - 1))})))
    _seed(seed, rank_context)
    return rank_context


def _start_torch() -> None:
    platform.set_device()
    if torch.distributed.is_initialized():
        return
    if _RANK in os.environ and _WORLD_SIZE in os.environ:
        rendezvous.join(platform.backend(), _TIMEOUT)
        return
    from torch._C._distributed_c10d import HashStore

    store = HashStore()
    torch.distributed.init_process_group(platform.backend(), store=store, rank=0, world_size=1)


def _allow_connections() -> None:
    """Raise the limit of open files to the maximum; many systems allow 1,024 by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _start_megatron(rank_context: RankContext, embedding_ranks: tuple[int, ...]) -> None:
    from megatron.core import parallel_state

    layout = rank_context.layout
    if parallel_state.model_parallel_is_initialized():
        if _megatron_sizes() == _layout_sizes(layout):
            _start_embedding(rank_context, embedding_ranks)
            return
        _log.info("creating Megatron's process groups again, for layout %s", layout)
        _end_megatron()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout().total_seconds() / 60,
        get_embedding_ranks=lambda pipeline: [pipeline[rank] for rank in embedding_ranks],
    )
    group = parallel_state.get_embedding_group(check_initialized=False)
    _started[:] = [_Groups(pipeline_group(), {embedding_ranks: group})]


def _start_embedding(rank_context: RankContext, embedding_ranks: tuple[int, ...]) -> None:
    """Set the embedding group of ``embedding_ranks`` on existing groups; collective if it is new."""
    from megatron.core import parallel_state

    if rank_context.layout.pp == 1:
        return
    if not _started or _started[0].pipeline is not pipeline_group():  # started by other code
        _started[:] = [_Groups(pipeline_group(), {})]
    known = _started[0].embedding
    if embedding_ranks not in known:
        known[embedding_ranks] = None
        for pipeline in rank_context.grid.groups("pp"):
            ranks = [pipeline[rank] for rank in embedding_ranks]
            group = parallel_state.create_group(ranks, timeout=timeout(), group_desc="EMBEDDING_GROUP")
            if rank_context.rank in ranks:
                known[embedding_ranks] = group
    parallel_state._EMBEDDING_GROUP = known[embedding_ranks]


def activate_process_groups(chunks: Iterable[GptModel]) -> None:
    """Set the global groups that Megatron looks up in each step to those of ``chunks``.

    Args:
        chunks: Megatron models of this rank, not wrapped.

    Raises:
        McaError: The groups that they were built on were replaced.
    """
    from megatron.core import parallel_state

    for chunk in chunks:
        built_on = chunk.pg_collection
        if built_on.pp is not pipeline_group():
            raise McaError(
                "the process groups of this model were replaced when a model with another layout was built; models "
                "that are used at the same time need equal parallel sizes (tensor_model_parallel_size, ...)"
            )
        parallel_state._EMBEDDING_GROUP = built_on.embd


def _end_megatron() -> None:
    """Destroy Megatron's groups, which Megatron only forgets: their threads would go on."""
    from megatron.core import parallel_state

    torch.distributed.barrier()  # no rank still receives in a group that another rank destroys
    _, *groups = parallel_state._global_process_group_list  # the first is the group of all ranks
    for group in groups:
        torch.distributed.destroy_process_group(group)
    _forget_groups()
    _started.clear()


def _forget_groups() -> None:
    """Let Megatron forget all groups.

    It keeps two. A process that is forked later would free them, and wait for threads that it does not have.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, ProcessGroup):
            setattr(parallel_state, name, None)


def timeout() -> timedelta:
    """Return the timeout that torch.distributed was started with."""
    world: ProcessGroup = torch.distributed.distributed_c10d._get_default_group()
    backend = world._get_backend(torch.device(platform.device_type()))
    options = getattr(backend, "options", None)  # torch's fake backend has no options, or no timeout
    return getattr(options, "_timeout", _TIMEOUT)


def _layout_sizes(layout: ParallelLayout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)


def _megatron_sizes() -> tuple[int, ...]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _seed(seed: int, rank_context: RankContext) -> None:
    """Seed Megatron's random states, once per process."""
    from megatron.core import tensor_parallel

    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(rank_seed(seed, rank_context))


def rank_seed(seed: int, rank_context: RankContext) -> int:
    """Return the seed of a rank's random states, which depends on its pipeline, context and data rank.

    Ranks with other layers or other tokens draw other dropout masks. Tensor-parallel ranks share a seed, because
    replicated activations must be dropped alike; Megatron adds their offset for sharded ones.
    """
    grid, coordinates = rank_context.grid, rank_context.coordinates
    number = (coordinates.pp * grid.layout.cp + coordinates.cp) * grid.data_parallel_size + coordinates.dp
    return seed + _SEEDS_OF_A_RANK * number


def seed_device(seed: int, rank_context: RankContext) -> None:
    """Set the device's generator, from which dropout outside of sharded tensors draws, to `rank_seed`."""
    # on a CPU the platform redirects this to torch's generator
    torch.cuda.manual_seed(rank_seed(seed, rank_context))


def stop() -> None:
    """Destroy all process groups, and Megatron's random states, which the next start seeds again."""
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        _forget_groups()
        tensor_parallel.get_cuda_rng_tracker().reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _started.clear()


def _group(name: str, **options: bool) -> ProcessGroup:
    from megatron.core import parallel_state

    group: ProcessGroup = getattr(parallel_state, f"get_{name}_group")(**options)
    return group


def context_group() -> ProcessGroup:
    """Return the context-parallel group of this rank."""
    return _group("context_parallel")


def pipeline_group() -> ProcessGroup:
    """Return the pipeline-parallel group of this rank."""
    return _group("pipeline_model_parallel")


def tensor_group() -> ProcessGroup:
    """Return the tensor-parallel group of this rank."""
    return _group("tensor_model_parallel")


def replica_group(expert: bool) -> ProcessGroup:
    """Return the ranks with the same shard of a parameter as this one, context-parallel ranks included."""
    return _group("expert_data_parallel") if expert else _group("data_parallel", with_context_parallel=True)


def replicas(expert: bool) -> list[int]:
    """Return the global ranks of `replica_group`, the first replica first."""
    return sorted(torch.distributed.get_process_group_ranks(replica_group(expert)))


def whole_model_group() -> ProcessGroup:
    """Return the smallest group with this rank that has all pipeline stages and all experts."""
    return _group("expert_tensor_model_pipeline_parallel")


def expert_tensor_group() -> ProcessGroup:
    """Return the expert-tensor-parallel group of this rank."""
    return _group("expert_tensor_parallel")


class LiveModel(Protocol):
    """One rank's part of a model: `VirtualModels`, or any class with the same attributes."""

    config: McaModelConfig
    rank_context: RankContext
    megatron: MegatronConfig
    chunks: torch.nn.ModuleList
    source: Path | None

    def local_params(self) -> Sequence[tuple[LocalParam, Tensor]]:
        """Return every parameter and saved buffer of this rank with its rule, second copies included."""

    def canonical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names and this rank's shards, without second copies of tied weights."""
