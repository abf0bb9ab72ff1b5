"""Process groups: torch.distributed from the environment, Megatron's from a layout.

The launcher's environment is read here alone, and Megatron's global parallel state for all that stands above. Layers
and patches, which stand below, ask Megatron for their groups themselves.
"""

import logging
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from mca_config.errors import McaError
from mca_config.layout import Coordinates, ParallelLayout, RankGrid
from mca_models.megatron import platform
from mca_models.megatron.distributed import rendezvous
from mca_models.megatron.types import GptModel

_log = logging.getLogger(__name__)
_RANK, _WORLD_SIZE = "RANK", "WORLD_SIZE"
_TIMEOUT = timedelta(minutes=30)
_FEW = 256  # ranks; over gloo each is connected with each of its groups

_SEEDS_OF_A_RANK = 2**20
"""More than all that Megatron adds to a seed: 2718 + tp, and 1024 + 100 ep + etp."""


@dataclass(frozen=True)
class RankContext:
    """Where this process stands.

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
        """All ranks' coordinates."""
        return RankGrid(self.layout, self.world_size)


@dataclass(frozen=True)
class _Groups:
    """Megatron's groups, and beside them one for every embedding that models on them share otherwise.

    Args:
        pipeline: This rank's pipeline group, which tells these groups from others that stood before or after.
        embedding: By pipeline ranks, this rank's group of those; None where it is none of them.
    """

    pipeline: ProcessGroup
    embedding: dict[tuple[int, ...], ProcessGroup | None]


_started: list[_Groups] = []
"""The groups that were started last, if any were."""


def start(
    layout: ParallelLayout, seed: int = 1234, *, embedding_ranks: tuple[int, ...] | None = None
) -> RankContext:
    """Starts what is missing of torch.distributed and Megatron's groups for ``layout``.

    Without a launcher's environment the world is this one process. Groups that stand already with the same sizes
    are used; those of another layout are replaced, and models that were built on them cannot be used any more.

    Args:
        layout: The parallel sizes.
        seed: Of Megatron's random states.
        embedding_ranks: The pipeline ranks that share the gradient of the vocabulary's rows; None: first and last.

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
    """Lets this process open as many files as it may; many systems allow 1,024 until they are asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _start_megatron(rank_context: RankContext, embedding_ranks: tuple[int, ...]) -> None:
    from megatron.core import parallel_state

    layout = rank_context.layout
    if parallel_state.model_parallel_is_initialized():
        if _megatron_sizes() == _layout_sizes(layout):
            _start_embedding(rank_context, embedding_ranks)
            return
        _log.info("replacing Megatron's process groups by those of %s", layout)
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
    """Puts the group of an embedding in place, beside groups that stand; collective where it is new."""
    from megatron.core import parallel_state

    if rank_context.layout.pp == 1:
        return
    if not _started or _started[0].pipeline is not pipeline_group():  # others have started these
        _started[:] = [_Groups(pipeline_group(), {})]
    known = _started[0].embedding
    if embedding_ranks not in known:
        known[embedding_ranks] = None
        for pipeline in rank_context.grid.groups("pp"):
            ranks = [pipeline[rank] for rank in embedding_ranks]
            made = parallel_state.create_group(ranks, timeout=timeout(), group_desc="EMBEDDING_GROUP")
            if rank_context.rank in ranks:
                known[embedding_ranks] = made
    parallel_state._EMBEDDING_GROUP = known[embedding_ranks]


def activate_process_groups(chunks: Iterable[GptModel]) -> None:
    """Puts in place those groups that Megatron looks up anew in each step and that another model may have changed.

    Args:
        chunks: Megatron models of this rank, not wrapped.

    Raises:
        McaError: The groups that they were built on do not stand any more.
    """
    from megatron.core import parallel_state

    for chunk in chunks:
        built_on = chunk.pg_collection
        if built_on.pp is not pipeline_group():
            raise McaError(
                "the process groups of this model were replaced when a model on another layout was made; models that "
                "are used side by side need equal parallel sizes (tensor_model_parallel_size and the others)"
            )
        parallel_state._EMBEDDING_GROUP = built_on.embd


def _end_megatron() -> None:
    """Ends Megatron's groups, which it only forgets: their threads would go on."""
    from megatron.core import parallel_state

    torch.distributed.barrier()  # no rank still receives in a group that another one ends
    _, *groups = parallel_state._global_process_group_list  # the first stands for all ranks
    for group in groups:
        torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    _started.clear()


def timeout() -> timedelta:
    """How long ranks wait for each other: what torch.distributed was started with."""
    world: ProcessGroup = torch.distributed.distributed_c10d._get_default_group()
    backend = world._get_backend(torch.device(platform.device_type()))
    options = getattr(backend, "options", None)  # torch's fake backend has none, or none with a time
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
    """Megatron's random states; once for each process."""
    from megatron.core import tensor_parallel

    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(rank_seed(seed, rank_context))


def rank_seed(seed: int, rank_context: RankContext) -> int:
    """The seed of one rank's random states: that of the run on the first, another on all that draw for themselves.

    Ranks that hold other layers or other tokens drop other ones. Tensor ranks share a seed, because what they hold
    twice must be dropped alike; Megatron adds their offset where they hold parts.
    """
    grid, coordinates = rank_context.grid, rank_context.coordinates
    number = (coordinates.pp * grid.layout.cp + coordinates.cp) * grid.data_parallel_size + coordinates.dp
    return seed + _SEEDS_OF_A_RANK * number


def seed_device(seed: int, rank_context: RankContext) -> None:
    """Sets the device's generator, from which dropout outside of cut tensors draws, to `rank_seed`."""
    # on a CPU the platform redirects this to torch's generator
    torch.cuda.manual_seed(rank_seed(seed, rank_context))


def stop() -> None:
    """Ends all process groups and the platform's helpers."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _started.clear()
    platform.close()


def context_group() -> ProcessGroup:
    """The context-parallel group of this rank."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def pipeline_group() -> ProcessGroup:
    """The pipeline-parallel group of this rank."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group


def tensor_group() -> ProcessGroup:
    """The tensor-parallel group of this rank."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def replica_group(expert: bool) -> ProcessGroup:
    """The ranks that hold the same piece of a parameter as this one; context ranks are among them."""
    from megatron.core import parallel_state

    if expert:
        group: ProcessGroup = parallel_state.get_expert_data_parallel_group()
        return group
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def replicas(expert: bool) -> list[int]:
    """Global ranks of `replica_group`, the one that speaks for all first."""
    return sorted(torch.distributed.get_process_group_ranks(replica_group(expert)))


def whole_model_group() -> ProcessGroup:
    """Ranks that hold all stages, and all experts, between them: with this one, as few as there can be."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return group


def expert_tensor_group() -> ProcessGroup:
    """The expert-tensor-parallel group of this rank."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_expert_tensor_parallel_group()
    return group
