"""Fill the live tensors of a model from a checkpoint or from a seed.

Both give the same model on every layout: slices of a file, or slices of full parameters, each drawn from its own
generator.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import Coordinates, ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.megatron.distributed import parallel
from mca_models.megatron.factory.vocabulary import VocabularyGrowth, grown_piece
from mca_models.megatron.features.feature import Start
from mca_models.megatron.features.features import active_features
from mca_models.megatron.names import LocalParam
from mca_models.megatron.tensors import copy_finite, seeded_generator, to_torch
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ModelSource, name_differences, plan_shard, read_shard
from mca_models.templates import get_family
from mca_models.weights import Param, Stage

_NORMS = ("layernorm.weight", "layer_norm_weight", "norm.weight")

_ONES = ("out_norm.weight", "dt_bias", "layer_scalar", "router_scale", "expert_scale", "k_norm_weight")
"""Norms of gated delta net and indexers, which are never zero-centered, and factors."""

_ZERO = ("bias",)
_BOUNDS = {"put_min": -torch.inf, "put_max": torch.inf}
"""Bounds of clipped linears."""
_DECAY = "A_log"
_AHEAD = 8
"""Maximum number of parameters drawn at once, each as a full fp32 tensor."""


def shard_rank_and_size(param: Param, layout: ParallelLayout, coordinates: Coordinates) -> tuple[int, int]:
    """Return (rank, size) of the sharding of ``param``: etp for experts, else tp; (0, 1) if replicated."""
    if param.shard.axis is None:
        return 0, 1
    return (coordinates.tp, layout.tp) if param.expert is None else (coordinates.etp, layout.etp)


def is_first_replica(param: Param, coordinates: Coordinates) -> bool:
    """Return whether the rank at ``coordinates`` is the first replica of its shard of ``param``."""
    if param.expert is not None:
        return coordinates.edp == 0 and (param.shard.axis is not None or coordinates.etp == 0)
    return (
        coordinates.dp == 0 and coordinates.cp == 0 and (param.shard.axis is not None or coordinates.tp == 0)
    )


def full_shape(param: Param, live: Tensor, config: McaModelConfig) -> tuple[int, ...]:
    """Return the shape of the full parameter, without vocabulary padding."""
    shape = list(live.shape)
    if param.shard.axis is not None:
        shape[param.shard.axis] *= config.layout.tp if param.expert is None else config.layout.etp
    if param.vocab:
        shape[0] = config.vocab_size
    return tuple(shape)


def require_same_names(source: ModelSource, config: McaModelConfig, where: str) -> None:
    """Raise unless the checkpoint has exactly the parameters of the model.

    Args:
        source: The checkpoint.
        config: The model.
        where: Names the checkpoint in errors.
    """
    built = (param for param in source.params if param.stage is not Stage.PASSTHROUGH)
    there = {param.mca_name() for param in built if param.alias_of is None}
    here = {p.mca_name() for p in get_family(config.model_type).params(config) if p.alias_of is None}
    if faults := name_differences(there, here):
        raise McaError(
            f"{where}: holds another model than this one: {faults}; name a checkpoint of this model"
        )


@torch.no_grad()
def from_source(
    source: ModelSource,
    params: Sequence[tuple[LocalParam, Tensor]],
    layout: ParallelLayout,
    coordinates: Coordinates,
    *,
    growth: VocabularyGrowth | None = None,
    broadcast: bool = False,
) -> int:
    """Copy each live tensor's slice out of an open, complete checkpoint.

    Args:
        source: The checkpoint.
        params: The tensors to fill.
        layout: The parallel sizes.
        coordinates: This rank's coordinates.
        growth: The vocabulary rows that the checkpoint lacks.
        broadcast: The first data-parallel replica reads and broadcasts; makes the call collective.

    Returns:
        Bytes that this rank read from the checkpoint.
    """
    known = stored_in(source)
    nbytes = 0
    for item, live in params:
        stored = known(item.param)
        group = parallel.replica_group(item.param.expert is not None) if broadcast else None
        if group is None or group.rank() == 0:
            rank, size = shard_rank_and_size(item.param, layout, coordinates)
            if growth is not None and stored.vocab:
                live.copy_(grown_piece(source, stored, growth, live, rank))
            else:
                read_into(live, source, stored, (rank, size))
            nbytes += _piece_bytes(source, stored, rank, size)
        if group is not None and group.size() > 1:
            torch.distributed.broadcast(live, torch.distributed.get_global_rank(group, 0), group=group)
    return nbytes


def rounded_names(source: ModelSource, params: Sequence[tuple[LocalParam, Tensor]]) -> list[str]:
    """Return the tensors of a checkpoint of several dtypes that have more bytes per element than ``params``.

    A checkpoint that has more for all is one in fp32 that is trained in half precision on purpose: none is returned.
    """
    known = stored_in(source)
    stored = {
        part.info.name: part.info.itemsize > live.itemsize
        for item, live in params
        for part in source.parts(known(item.param))
        if isinstance(part.info, TensorInfo)
    }
    return [] if all(stored.values()) else [name for name, is_wider in stored.items() if is_wider]


def stored_in(source: ModelSource) -> Callable[[Param], Param]:
    """Return a function from a model's parameter to the checkpoint's parameter."""
    by_name = {param.mca_name(): param for param in source.params}
    return lambda param: by_name[param.alias_of or param.mca_name()]


def read_into(live: Tensor, source: ModelSource, stored: Param, cut: tuple[int, int]) -> None:
    """Copy one shard of a parameter out of a checkpoint.

    Args:
        live: The tensor to fill.
        source: The checkpoint.
        stored: The checkpoint's parameter.
        cut: (rank, size) from `shard_rank_and_size`.
    """
    copy_finite(live, to_torch(read_shard(source, stored, *cut)), stored.mca_name())


def _piece_bytes(source: ModelSource, param: Param, rank: int, size: int) -> int:
    """Return the bytes that ``read_shard`` reads from the files; an estimate for grown vocabularies."""
    gather, parts = plan_shard(source, param, rank, size)
    return sum(move.run * move.repeat * parts[move.part].info.itemsize for move in gather.moves)


@torch.no_grad()
def from_seed(
    seed: int, params: Sequence[tuple[LocalParam, Tensor]], config: McaModelConfig, coordinates: Coordinates
) -> None:
    """Draw each full parameter as Hugging Face initialises it and keep this rank's shard.

    Matrices are normal with ``init_method_std``, norms one (zero if zero-centered), biases zero.
    """
    for (item, live), whole in zip(params, _draw_params(seed, params, config), strict=True):
        rank, size = shard_rank_and_size(item.param, config.layout, coordinates)
        if item.param.vocab and size > 1:
            padding = config.padded_vocab_size - config.vocab_size
            whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
        live.copy_(item.param.shard.take(whole, rank, size))


def _draw_params(
    seed: int, params: Sequence[tuple[LocalParam, Tensor]], config: McaModelConfig
) -> Iterator[Tensor]:
    """Yield the full parameters in order.

    Generators run on the CPU, because a GPU's numbers depend on its model and replicas must start equal. A generator
    uses one thread; each parameter has its own generator, so that several are drawn at once.
    """
    shapes = [full_shape(item.param, live, config) for item, live in params]
    starts = _starts(config)
    threads = min(torch.get_num_threads(), _AHEAD)
    if threads == 1:
        for (item, _), shape in zip(params, shapes, strict=True):
            yield _draw_param(seed, item.param, shape, config, starts)
        return
    with ThreadPoolExecutor(threads) as pool:
        drawn: deque[Future[Tensor]] = deque()
        for (item, _), shape in zip(params, shapes, strict=True):
            drawn.append(pool.submit(_draw_param, seed, item.param, shape, config, starts))
            if len(drawn) == threads:
                yield drawn.popleft().result()
        while drawn:
            yield drawn.popleft().result()


def _starts(config: McaModelConfig) -> list[Start]:
    return [feature.start for feature in active_features(config) if feature.start is not None]


def _draw_param(
    seed: int, param: Param, shape: tuple[int, ...], config: McaModelConfig, starts: Sequence[Start]
) -> Tensor:
    name = param.alias_of or param.mca_name()
    for find_start in starts:
        if (start := find_start(name, shape, seed)) is not None:
            return start
    if name.endswith(_ONES):
        return torch.ones(shape)
    if param.stage is Stage.VISION and (bound := _BOUNDS.get(name[-len("put_min") :])) is not None:
        return torch.full(shape, bound)
    if param.stage is Stage.VISION and len(shape) < 2 and not name.endswith(_ZERO):
        return torch.ones(shape)
    if name.endswith(_NORMS):
        return torch.full(shape, 0.0 if config.norm.layernorm_zero_centered_gamma else 1.0)
    if name.endswith(_ZERO):
        return torch.zeros(shape)
    generator = seeded_generator(f"{seed}/{name}")
    if name.endswith(_DECAY):
        return torch.empty(shape).uniform_(0.01, 16.0, generator=generator).log_()
    return torch.empty(shape).normal_(0.0, config.init_method_std, generator=generator)
