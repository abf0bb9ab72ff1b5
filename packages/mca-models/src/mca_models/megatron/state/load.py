"""Hugging Face tensors that come one after the other, in any order, put where this rank holds them.

Every rank sees all of them and keeps the elements of its own pieces; nothing is kept until others have come. Files are
read in `factory.fill`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from mca_config.errors import McaError, RankFailed, raise_problems
from mca_models.megatron.distributed.collectives import together
from mca_models.megatron.factory.fill import cut_of
from mca_models.megatron.live import LiveModel
from mca_models.megatron.names import Held
from mca_models.megatron.state.facts import params_of
from mca_models.storage.moves import HF, Side
from mca_models.storage.runs import Move, Shape
from mca_models.storage.source import different_names, plan_gathers, shapes_of_parts
from mca_models.templates import family_of
from mca_models.templates.shapes import whole_shape
from mca_models.weights import Param

Weight = tuple[str, Tensor] | tuple[str, Tensor, int]
"""Name and tensor; or name, some rows of the tensor, and which of its rows the first of them is."""

_SHOWN = 8


def load_weights(models: LiveModel, weights: Iterable[Weight]) -> None:
    """See ``VirtualModels.load_weights``."""
    loading = _Loading(models)

    def take() -> None:
        for name, tensor, *start in weights:
            loading.take(name, tensor, start[0] if start else None)
        loading.finish()

    try:
        together(take)
    except RankFailed as error:
        raise McaError(f"rank {error.rank} could not load the weights: {error.cause}") from error


@dataclass(frozen=True)
class _Use:
    """Where elements of a tensor go.

    Args:
        live: This rank's piece, flat.
        moves: What goes where.
        first: The element of the tensor that the moves count from: an expert's first.
    """

    live: Tensor
    moves: Sequence[Move]
    first: int = 0


@dataclass
class _Arrived:
    """What has come of a tensor.

    Args:
        shape: That it must have.
        rows: How many of its rows have come.
        ranges: First row of each piece that has come, and the row behind its last.
        parts: Where they came in pieces, those that this rank has to put together.
    """

    shape: Shape
    rows: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    parts: Tensor | None = None


class _Loading:
    """The tensors that a model needs, and those that have come."""

    def __init__(self, models: LiveModel) -> None:
        config = models.config
        self._copies = family_of(config.model_type).duplicate_hf(config)
        self._expected: dict[str, _Arrived] = {}
        params = {param.mca_name(): param for param in params_of(models)}
        for param in params.values():
            front = (config.num_moe_experts or 0,) if param.stacked else ()
            for name, shape in _shapes(param, models).items():
                self._expected.setdefault(name, _Arrived(front + shape))
        self._uses: dict[str, list[_Use]] = {}
        for item, live in models.held():
            self._add(params[item.param.alias_of or item.param.mca_name()], item, live, models)
        self._twins = {name: _Arrived(self._expected[other].shape) for name, other in self._copies.items()}
        self._problems: list[str] = []

    @torch.no_grad()
    def _add(self, param: Param, item: Held, live: Tensor, models: LiveModel) -> None:
        rank, size = cut_of(item.param, models.place.layout, models.place.at)
        cut: Side = 1 if param.shard.axis is None else size
        gather = plan_gathers(param, whole_shape(param, models.config), HF, cut)[rank]
        flat = live.detach().view(-1)
        for start, stop in gather.zeros:
            flat[start:stop] = 0
        for number, (name, shape) in enumerate(_shapes(param, models).items()):
            first = (param.expert or 0) * prod(shape) if param.stacked else 0
            moves = [move for move in gather.moves if move.part == number]
            self._uses.setdefault(name, []).append(_Use(flat, moves, first))

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor, start: int | None) -> None:
        """A tensor, or its rows from ``start`` on. What is wrong with it is told by `finish`."""
        arrived = self._expected.get(name) or self._twins.get(name)
        if arrived is None:
            self._problems.append(f"1 unexpected tensor ({name})")
            return
        first, shape = start or 0, tuple(tensor.shape)
        fits = (
            shape[1:] == arrived.shape[1:] and 0 <= first <= first + shape[0] <= arrived.shape[0]
            if shape
            else False
        )
        if not fits or (start is None and shape != arrived.shape):
            rows = "" if start is None else f" from row {start} on"
            self._problems.append(f"{name} has shape {list(shape)}{rows}, expected {list(arrived.shape)}")
            arrived.rows = arrived.shape[0]  # not missing too
        elif any(first < stop and begin < first + shape[0] for begin, stop in arrived.ranges):
            self._problems.append(f"{name} came twice")
        else:
            arrived.ranges.append((first, first + shape[0]))
            arrived.rows += shape[0]
            self._keep(name, tensor, arrived, first)

    def _keep(self, name: str, tensor: Tensor, arrived: _Arrived, first: int) -> None:
        original = self._copies.get(name, name)
        uses = self._uses.get(original, ())
        if not uses:
            return
        if tuple(tensor.shape) != arrived.shape:
            if arrived.parts is None:
                arrived.parts = torch.empty(arrived.shape, dtype=tensor.dtype, device=uses[0].live.device)
            arrived.parts[first : first + len(tensor)] = tensor
            if arrived.rows < arrived.shape[0]:
                return
            tensor, arrived.parts = arrived.parts, None
        given = tensor.detach().to(uses[0].live.device).contiguous().view(-1)
        act = self._compared if self._has_twin(name, original) else _copied
        if not all([act(given, use) for use in uses]):
            self._problems.append(f"{name} differs from the tensor that it is tied to")

    def _has_twin(self, name: str, original: str) -> bool:
        """Whether a tied tensor with the same elements has come already."""
        same = [original, *(copy for copy, other in self._copies.items() if other == original)]
        arrived = [self._expected.get(each) or self._twins[each] for each in same if each != name]
        return any(each.rows == each.shape[0] for each in arrived)

    def _compared(self, given: Tensor, use: _Use) -> bool:
        return all(
            torch.equal(_of(given, move, use.first).to(use.live.dtype), _target(use.live, move))
            for move in use.moves
        )

    def finish(self) -> None:
        """Raises one error with all that was wrong, or is missing."""
        missing = different_names(
            [name for name, arrived in self._expected.items() if arrived.rows == arrived.shape[0]],
            self._expected,
        )
        raise_problems([*self._problems, *([missing] if missing else [])], "the weights", shown=_SHOWN)


def _shapes(param: Param, models: LiveModel) -> Mapping[str, Shape]:
    shapes = shapes_of_parts(param, whole_shape(param, models.config), HF)
    return dict(zip(param.hf_names(), shapes, strict=True))


def _copied(given: Tensor, use: _Use) -> bool:
    for move in use.moves:
        _target(use.live, move).copy_(_of(given, move, use.first))
    return True


def _of(given: Tensor, move: Move, first: int) -> Tensor:
    """What ``move`` reads of a flat tensor."""
    strides = (move.source_stride, move.source_step)
    return given.as_strided((move.repeat, move.run), strides, given.storage_offset() + first + move.source)


def _target(live: Tensor, move: Move) -> Tensor:
    """Where ``move`` writes in a flat piece."""
    strides = (move.target_stride, move.target_step)
    return live.as_strided((move.repeat, move.run), strides, live.storage_offset() + move.target)
