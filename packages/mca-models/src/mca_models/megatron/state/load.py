"""Load a stream of Hugging Face tensors, in any order, into this rank's shards.

Every rank gets all tensors and keeps the elements of its shards at once, except for rows of a tensor
(`weight_receiver`) and fp8 values without scales (`quantization.fp8`). `factory.fill` reads files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.factory.fill import shard_rank_and_size
from mca_models.megatron.names import LocalParam
from mca_models.megatron.state.fp8 import DequantizedWeights
from mca_models.megatron.state.param_specs import model_params
from mca_models.megatron.state.weight_receiver import Weight, WeightReceiver, load_on_all_ranks, receive_all
from mca_models.megatron.tensors import copy_finite
from mca_models.storage.byte_ranges import Move, Shape
from mca_models.storage.copy_plan import HF, Side
from mca_models.storage.source import param_part_shapes, plan_gathers
from mca_models.templates import get_family
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param


def load_weights(models: LiveModel, weights: Iterable[Weight]) -> None:
    """Load weights on all ranks; see ``VirtualModels.load_weights``."""
    load_on_all_ranks(lambda: load_local_weights(models, weights))


def load_local_weights(models: LiveModel, weights: Iterable[Weight]) -> None:
    """Load weights on this rank only.

    Raises:
        McaError: Names are missing or unexpected, or a shape differs.
    """
    parallel.activate_process_groups(models.chunks)
    loading = _Loading(models)
    plain = DequantizedWeights(loading.receiver.expected_shape, loading.receiver.report, loading.uses)
    receive_all(plain.dequantize(weights), loading.receive)
    loading.receiver.finish()


@dataclass(frozen=True)
class _Use:
    """Copy of a tensor's elements to a live tensor.

    Args:
        live: This rank's shard, flat.
        moves: The moves of elements.
        first: Offset of the moves in the tensor: an expert's first element.
    """

    live: Tensor
    moves: Sequence[Move]
    first: int = 0


class _Loading:
    """Tensors that a model needs, and those received."""

    def __init__(self, models: LiveModel) -> None:
        config = models.config
        self._copies = get_family(config.model_type).duplicated_hf_tensors(config)
        expected: dict[str, Shape] = {}
        params = {param.mca_name(): param for param in model_params(models)}
        for param in params.values():
            front = (config.num_experts,) if param.stacked else ()
            for name, shape in _shapes(param, models).items():
                expected.setdefault(name, front + shape)
        self._uses: dict[str, list[_Use]] = {}
        for item, live in models.local_params():
            self._add(params[item.param.alias_of or item.param.mca_name()], item, live, models)
        twins = {name: expected[other] for name, other in self._copies.items() if name not in expected}
        self.receiver = WeightReceiver(expected, twins)

    @torch.no_grad()
    def _add(self, param: Param, item: LocalParam, live: Tensor, models: LiveModel) -> None:
        rank, size = shard_rank_and_size(
            item.param, models.rank_context.layout, models.rank_context.coordinates
        )
        cut: Side = 1 if param.shard.axis is None else size
        gather = plan_gathers(param, full_shape(param, models.config), HF, cut)[rank]
        flat = live.detach().view(-1)
        for start, stop in gather.zeros:
            flat[start:stop] = 0
        for number, (name, shape) in enumerate(_shapes(param, models).items()):
            first = (param.expert or 0) * prod(shape) if param.stacked else 0
            moves = [move for move in gather.moves if move.part == number]
            self._uses.setdefault(name, []).append(_Use(flat, moves, first))

    def uses(self, name: str) -> bool:
        """Return whether this rank needs tensor ``name``."""
        return self._copies.get(name, name) in self._uses

    @torch.no_grad()
    def receive(self, name: str, tensor: Tensor, start: int | None) -> None:
        """Copy a tensor, or its rows from ``start`` on, to the live tensors."""
        whole = self.receiver.receive(name, tensor, start, keep=self.uses(name))
        if whole is None:
            return
        original = self._copies.get(name, name)
        uses = self._uses[original]
        source = whole.detach().to(uses[0].live.device).contiguous().view(-1)
        act = self._equal if self._has_twin(name, original) else _copy
        if not all([act(source, use, name) for use in uses]):
            self.receiver.report(name, f"{name} differs from the tensor that it is tied to")

    def _has_twin(self, name: str, original: str) -> bool:
        """Return whether a tied tensor with the same elements was received already."""
        same = [original, *(copy for copy, other in self._copies.items() if other == original)]
        return any(self.receiver.is_complete(each) for each in same if each != name)

    def _equal(self, source: Tensor, use: _Use, _: str) -> bool:
        return all(
            torch.equal(
                _source_view(source, move, use.first).to(use.live.dtype), _target_view(use.live, move)
            )
            for move in use.moves
        )


def _shapes(param: Param, models: LiveModel) -> Mapping[str, Shape]:
    shapes = param_part_shapes(param, full_shape(param, models.config), HF)
    return dict(zip(param.hf_names(), shapes, strict=True))


def _copy(source: Tensor, use: _Use, name: str) -> bool:
    for move in use.moves:
        copy_finite(_target_view(use.live, move), _source_view(source, move, use.first), name)
    return True


def _source_view(source: Tensor, move: Move, first: int) -> Tensor:
    """Return the elements that ``move`` reads from a flat tensor."""
    strides = (move.source_stride, move.source_step)
    return source.as_strided((move.repeat, move.run), strides, source.storage_offset() + first + move.source)


def _target_view(live: Tensor, move: Move) -> Tensor:
    """Return the elements that ``move`` writes in a flat shard."""
    strides = (move.target_stride, move.target_step)
    return live.as_strided((move.repeat, move.run), strides, live.storage_offset() + move.target)
