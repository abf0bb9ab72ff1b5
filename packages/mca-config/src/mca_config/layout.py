"""Parallel sizes and the rank grid, in Megatron's order tp-cp-ep-dp-pp; strings of pipeline layouts.

`checks` decides whether a model fits a layout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mca_config.errors import McaError
from mca_config.printable import counted

_LONGEST = 100_000
_ATOM = re.compile(r"([EtmL|])(?:\*(\d+))?")
_GROUP = re.compile(r"\(((?:[EtmL|](?:\*\d+)?)+)\)\*(\d+)")


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each stage, in pipeline order: all ranks of virtual stage 0, then of stage 1, ..."""
    compact = text.replace(",", "")
    position, flat = 0, ""
    while position < len(compact):
        group = _GROUP.match(compact, position)
        atom = group or _ATOM.match(compact, position)
        if atom is None:
            raise McaError(
                f"pipeline_model_parallel_layout {text!r:.200} cannot be read at {compact[position:]!r:.200}; expected "
                "E, t, m, L or | (each with *n at most once), or a group of them in one pair of parentheses "
                "with *n"
            )
        letters = _ATOM.findall(group[1] if group else atom[0])
        run, times = "".join(x * _count(n or "1") for x, n in letters), _count(group[2]) if group else 1
        if len(flat) + len(run) * times > _LONGEST:
            raise McaError(
                f"pipeline_model_parallel_layout {text!r:.200}: more than {_LONGEST} layers and stages"
            )
        flat += run * times
        position = atom.end()
    return tuple(flat.split("|"))


def _count(digits: str) -> int:
    """Return the number, or one above every limit if it has too many digits."""
    return int(digits) if len(digits) < 6 else _LONGEST + 1


SIZE_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Parallel sizes of a layout, by abbreviation."""
MAX_SIZE = 1 << 16
"""Largest parallel size; a larger number is a typing error."""
_STAGE_SIZES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The parallel sizes, which decide the shards of each rank.

    A virtual size of 1 is stored as None, and a layout string sets the virtual size, so that equal
    layouts compare equal.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: equal to ``tensor_model_parallel_size`` (Megatron's default)."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's layout string, such as ``Et*3|t*4|t*4L``."""
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    def __post_init__(self) -> None:
        for name in (*SIZE_FIELDS.values(), *_STAGE_SIZES):
            _require_count(name, getattr(self, name))
        self._require_single_split()
        if self.pipeline_model_parallel_layout is not None:
            self._set_virtual_size(self.pipeline_model_parallel_layout)
        if self.virtual_pipeline_model_parallel_size == 1:
            object.__setattr__(self, "virtual_pipeline_model_parallel_size", None)
        if self.vpp > 1 and self.pp == 1:
            raise McaError(
                f"virtual_pipeline_model_parallel_size {self.vpp} needs pipeline_model_parallel_size of at "
                "least 2; set the virtual size to 1 or raise the pipeline size"
            )

    def _require_single_split(self) -> None:
        uneven = [name for name in _STAGE_SIZES if getattr(self, name) is not None]
        accounts = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        accounted = [name for name in accounts if getattr(self, name)]
        if self.pipeline_model_parallel_layout is not None and (uneven or accounted):
            raise McaError(
                f"pipeline_model_parallel_layout already splits the layers; remove "
                f"{', '.join(uneven + accounted)}"
            )
        if uneven and accounted:
            raise McaError(
                f"{', '.join(uneven)} cannot be combined with {', '.join(accounted)}; keep one of the two"
            )
        if uneven and self.pp == 1:
            raise McaError(
                f"{', '.join(uneven)} needs pipeline_model_parallel_size of at least 2; remove it or raise "
                "the pipeline size"
            )

    def _set_virtual_size(self, text: str) -> None:
        stages = len(parse_layout(text))
        if stages % self.pp:
            raise McaError(
                f"pipeline_model_parallel_layout {text!r} has {counted(stages, 'stage')}, which "
                f"pipeline_model_parallel_size {self.pp} does not divide; change one of the two"
            )
        size = stages // self.pp
        requested = self.virtual_pipeline_model_parallel_size
        if requested is not None and requested != size:
            raise McaError(
                f"pipeline_model_parallel_layout {text!r} has {counted(stages, 'stage')}, so at "
                f"pipeline_model_parallel_size {self.pp} the virtual size is {size}; remove "
                f"virtual_pipeline_model_parallel_size {requested}"
            )
        object.__setattr__(self, "virtual_pipeline_model_parallel_size", size)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks on each pipeline rank; 1 without virtual pipelining."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Tensor-parallel size within an expert."""
        return self.expert_tensor_parallel_size or self.tp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the dense parameters: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def expert_model_size(self) -> int:
        """Ranks that share one replica of the expert parameters: etp x ep x pp."""
        return self.etp * self.ep * self.pp

    def bubble(self, micro_batches: int) -> float:
        """Return the pipeline bubble as a fraction of a step, with ``micro_batches`` micro-batches per replica."""
        idle = self.pp - 1
        return idle / (micro_batches * self.vpp + idle)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}"]
        parts += [f"{name} {size}" for name, size in (("vpp", self.vpp), ("cp", self.cp)) if size > 1]
        if self.ep > 1 or self.etp != self.tp:
            parts += [f"ep {self.ep}", f"etp {self.etp}"]
        if self.pipeline_model_parallel_layout is not None:
            parts.append(f"layout {self.pipeline_model_parallel_layout}")
        return " ".join(parts)


def _require_count(name: str, value: object) -> None:
    if value is None and name not in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise McaError(f"{name} must be an integer of at least 1, not {value!r:.80}")
    if value > MAX_SIZE:
        raise McaError(f"{name} must be at most {MAX_SIZE}, not a number of {len(str(value))} digits")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Indices of one rank in the dense grid (tp, cp, dp, pp) and in the expert grid (etp, ep, edp, pp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


class RankGrid:
    """The grid of ``world_size`` ranks with the parallel sizes of ``layout``.

    The first axis varies fastest: neighbouring ranks share all but the tensor-parallel coordinate. The
    expert grid has the same ranks and the same pipeline axis as the dense one.
    """

    def __init__(self, layout: ParallelLayout, world_size: int) -> None:
        _require_divisible(layout, world_size)
        self.layout = layout
        self.world_size = world_size
        self.data_parallel_size = world_size // layout.model_parallel_size
        self.expert_data_parallel_size = world_size // layout.expert_model_size
        dense = {"tp": layout.tp, "cp": layout.cp, "dp": self.data_parallel_size, "pp": layout.pp}
        expert = {"etp": layout.etp, "ep": layout.ep, "edp": self.expert_data_parallel_size, "pp": layout.pp}
        self._grids: tuple[dict[str, int], ...] = (dense, expert)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the indices of ``rank`` in both grids."""
        if not 0 <= rank < self.world_size:
            raise McaError(
                f"rank {rank} is outside 0 to {self.world_size - 1}, of {counted(self.world_size, 'rank')}"
            )
        indices: dict[str, int] = {}
        for sizes in self._grids:
            indices |= _axis_indices(rank, sizes)
        return Coordinates(**indices)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank with these indices in the dense grid."""
        return _rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, self._grids[0])

    def expert_rank(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """Return the rank with these indices in the expert grid."""
        return _rank({"etp": etp, "ep": ep, "edp": edp, "pp": pp}, self._grids[1])

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that differ only along ``axis``.

        Args:
            axis: One axis (``"tp"``) or several of one grid joined by ``-`` (``"dp-cp"``, ``"etp-ep"``).
        """
        axes = axis.split("-")
        sizes = next((grid for grid in self._grids if grid.keys() >= set(axes)), None)
        if sizes is None:
            raise McaError(
                f"axis {axis!r}: expected names of {set(self._grids[0])} or of {set(self._grids[1])}"
            )
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            indices = _axis_indices(rank, sizes)
            key = tuple(index for name, index in indices.items() if name not in axes)
            groups.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def rank_group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the group along ``axis`` that contains ``rank``."""
        return next(group for group in self.groups(axis) if rank in group)


def _require_divisible(layout: ParallelLayout, world_size: int) -> None:
    dense, expert = layout.model_parallel_size, layout.expert_model_size
    if world_size < 1 or world_size % dense:
        raise McaError(
            f"{counted(world_size, 'rank')} cannot be divided into tensor_model_parallel_size {layout.tp} x "
            f"context_parallel_size {layout.cp} x pipeline_model_parallel_size {layout.pp} = {dense}; "
            f"{_fitting_ranks(world_size, dense)}"
        )
    if world_size % expert:
        raise McaError(
            f"{counted(world_size, 'rank')} cannot be divided into expert_tensor_parallel_size {layout.etp} x "
            f"expert_model_parallel_size {layout.ep} x pipeline_model_parallel_size {layout.pp} = {expert}; "
            f"{_fitting_ranks(world_size, expert)}"
        )


def _fitting_ranks(world_size: int, size: int) -> str:
    """Return the advice to start the nearest multiples of ``size``."""
    below = max(world_size, 0) // size * size
    nearest = " or ".join(str(ranks) for ranks in (below, below + size) if ranks)
    return f"start {nearest} (nproc_per_node, or --nproc-per-node of torchrun), or change a size"


def _axis_indices(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    indices = {}
    for name, size in sizes.items():
        rank, indices[name] = divmod(rank, size)
    return indices


def _rank(indices: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank, stride = 0, 1
    for name, size in sizes.items():
        if not 0 <= indices[name] < size:
            raise McaError(f"{name} {indices[name]} is outside 0 to {size - 1}, the ranks of that axis")
        rank += stride * indices[name]
        stride *= size
    return rank
