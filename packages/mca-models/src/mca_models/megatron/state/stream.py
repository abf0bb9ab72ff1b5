"""Stream of parameters from the ranks with their shards to the ranks that need them as Hugging Face tensors.

One bucket is used while the next one is communicated. Each rank gets the shards from its own replica, at their final
offsets in the buffer. This module executes the plan of `buckets`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.distributed
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelinePlan
from mca_models.checkpoint.placement import expert_rank, pipeline_stage
from mca_models.megatron import platform
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.state.buckets import Bucket, Slot, byte_view
from mca_models.megatron.tensors import cast_finite
from mca_models.weights import Param

Piece = Callable[[str], Tensor | None]
"""Returns this rank's shard of a parameter by canonical name; None if it has none."""


@dataclass(frozen=True)
class WeightSource:
    """Ranks with the shards of each parameter, and this rank's shards.

    Args:
        rank_context: This rank and the layout.
        config: The model, with its layout.
        piece: Returns this rank's shards.
    """

    rank_context: RankContext
    config: McaModelConfig
    piece: Piece

    @cached_property
    def _plan(self) -> PipelinePlan:
        return self.config.pipeline_plan()

    @cached_property
    def _grid(self) -> RankGrid:
        return self.rank_context.grid

    def owner(self, param: Param, number: int) -> int:
        """Return the rank of this replica that sends shard ``number`` to this rank."""
        coordinates, pp = self.rank_context.coordinates, pipeline_stage(param, self._plan)
        whole = param.shard.axis is None
        if param.expert is None:
            return self._grid.rank(
                tp=coordinates.tp if whole else number, cp=coordinates.cp, dp=coordinates.dp, pp=pp
            )
        ep = expert_rank(param, self.config)
        return self._grid.expert_rank(
            etp=coordinates.etp if whole else number, ep=ep, edp=coordinates.edp, pp=pp
        )

    def number(self, param: Param) -> int:
        """Return the index of this rank's shard, if it has the parameter."""
        coordinates = self.rank_context.coordinates
        return 0 if param.shard.axis is None else coordinates.tp if param.expert is None else coordinates.etp

    def receivers(self, targets: frozenset[int]) -> Mapping[tuple[bool, bool], list[int]]:
        """Return the ``targets`` that this rank sends to, by (is expert, is replicated)."""
        mine = self.rank_context.coordinates
        receivers: dict[tuple[bool, bool], list[int]] = {
            (e, w): [] for e, w in product((False, True), repeat=2)
        }
        for target in sorted(targets):
            coordinates = self._grid.coordinates(target)
            same = ((coordinates.dp, coordinates.cp) == (mine.dp, mine.cp), coordinates.edp == mine.edp)
            alike = (coordinates.tp == mine.tp, coordinates.etp == mine.etp)
            for experts, whole in receivers:
                if same[experts] and (alike[experts] or not whole):
                    receivers[experts, whole].append(target)
        return receivers


@dataclass(frozen=True)
class FilledBucket:
    """Received bucket.

    Args:
        bucket: Its plan.
        buffer: Its bytes.
    """

    bucket: Bucket
    buffer: Tensor


def stream(source: WeightSource, buckets: Sequence[Bucket]) -> Generator[FilledBucket, None, None]:
    """Yield the filled buckets of this rank; collective: all ranks must iterate to the end.

    Raises:
        McaError: A rank failed or stopped before the end; all others name it.
    """
    agreement = _Agreement(source.rank_context, len(buckets))
    ahead: _Transfer | None = None
    try:
        ahead = _start_transfer(source, buckets[0], agreement) if buckets else None
        for number in range(len(buckets)):
            filled = ahead.finish() if ahead is not None else None
            ahead = None
            if number + 1 < len(buckets):
                ahead = _start_transfer(source, buckets[number + 1], agreement)
            if filled is not None:
                yield filled
            del filled
    finally:
        if ahead is not None:
            with suppress(McaError):
                ahead.wait()
        agreement.leave()


def _start_transfer(source: WeightSource, bucket: Bucket, agreement: "_Agreement") -> "_Transfer":
    """Start the transfer of ``bucket`` once every rank is ready."""
    transfer = _Transfer(source, bucket, agreement)
    agreement.proceed()
    transfer.post()
    return transfer


class _Agreement:
    """All-reduce before each bucket by which ranks agree to continue, so that none waits for a rank that left.

    Args:
        rank_context: This rank and the layout.
        count: Number of buckets.
    """

    def __init__(self, rank_context: RankContext, count: int) -> None:
        self._rank_context, self._left = rank_context, count
        self.over = False

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Convert errors of communication with a dead rank to a McaError."""
        try:
            yield
        except RuntimeError as error:
            self.over = True
            why = next(iter(str(error).splitlines()), "")
            raise McaError(
                f"the stream of weights stopped on rank {self._rank_context.rank}: another rank was lost ({why:.120})"
            ) from error

    def proceed(self) -> None:
        """Announce that this rank is ready for the next bucket.

        Raises:
            McaError: Another rank left.
        """
        self._left -= 1
        if left := self._exchange(0):
            self.over = True
            raise McaError(
                f"rank {left - 1} failed or stopped receiving weights before the last one; all ranks must run "
                "the loop to its end"
            )

    def leave(self) -> None:
        """Announce that this rank stops; does nothing after the last bucket, or if the others know."""
        if self.over or self._left <= 0:
            return
        with suppress(McaError):  # a dead rank has left too
            self._exchange(self._rank_context.rank + 1)
        self.over = True

    def _exchange(self, left: int) -> int:
        box = torch.tensor([left], dtype=torch.int64, device=platform.current_device())
        with self.communicating():
            torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MAX)
            return int(box)


class _Transfer:
    """Sends and receives of one bucket."""

    def __init__(self, source: WeightSource, bucket: Bucket, agreement: _Agreement) -> None:
        self._source, self._bucket, self._agreement = source, bucket, agreement
        self._receivers = source.receivers(bucket.targets)
        self._messages: list[torch.distributed.P2POp] = []
        self._works: list[torch.distributed.Work] = []
        device = platform.current_device()
        self._buffer = (
            torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
            if source.rank_context.rank in bucket.targets
            else None
        )
        for slot in bucket.slots:
            self._add(slot)

    def _add(self, slot: Slot) -> None:
        source, me = self._source, self._source.rank_context.rank
        pieces = _piece_views(slot, self._buffer) if self._buffer is not None else ()
        number = source.number(slot.param)
        local = self._local_piece(slot, number)
        kind = (slot.param.expert is not None, slot.param.shard.axis is None)
        receivers = [] if local is None else self._receivers[kind]
        if local is not None and me in receivers:
            local = pieces[number].copy_(local)
        if local is not None and local.numel():
            self._messages += [
                torch.distributed.P2POp(torch.distributed.isend, local, target)
                for target in receivers
                if target != me
            ]
        for index, piece in enumerate(pieces):
            owner = source.owner(slot.param, index)
            if owner != me and piece.numel():
                self._messages.append(torch.distributed.P2POp(torch.distributed.irecv, piece, owner))

    def _local_piece(self, slot: Slot, number: int) -> Tensor | None:
        name = slot.param.mca_name()
        piece = self._source.piece(name)
        if piece is None:
            return None
        if slot.param.vocab:
            piece = piece[: slot.pieces[number][0]]
        return cast_finite(piece.detach(), slot.dtype, name).contiguous()

    def post(self) -> None:
        """Start the sends and receives."""
        if self._messages:  # batched: two ranks with a shard for each other would deadlock in NCCL
            with self._agreement.communicating():
                self._works = torch.distributed.batch_isend_irecv(self._messages)

    def wait(self) -> None:
        """Wait until all sends and receives are done."""
        with self._agreement.communicating():
            for work in self._works:
                work.wait()
        self._works, self._messages = [], []

    def finish(self) -> FilledBucket | None:
        """Return the bucket with its Hugging Face tensors; None if this rank only sent."""
        self.wait()
        if self._buffer is None:
            return None
        for slot in self._bucket.slots:
            _arrange(slot, self._buffer)
        return FilledBucket(self._bucket, self._buffer)


def _piece_views(slot: Slot, buffer: Tensor) -> list[Tensor]:
    """Return the views of the buffer that receive the shards."""
    pieces: list[Tensor] = []
    start = slot.start
    for shape in slot.pieces:
        pieces.append(byte_view(buffer, start, slot.dtype, shape))
        start += pieces[-1].nbytes
    return pieces


def _arrange(slot: Slot, buffer: Tensor) -> None:
    """Replace the shards of a parameter by its Hugging Face tensors, in place."""
    pieces = _piece_views(slot, buffer)
    rows = slot.param.shard.axis == 0 and len(slot.param.shard.segments) == 1
    if rows and len(pieces) > 1:  # the shards are contiguous
        shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
        pieces = [byte_view(buffer, slot.start, slot.dtype, shape)]
    tensors: Sequence[Tensor] = slot.param.to_hf(pieces)
    targets = [entry.view(buffer) for entry in slot.outputs]
    if all(map(_is_there, tensors, targets)):
        return
    memory = buffer.untyped_storage().data_ptr()
    for tensor, target in zip(
        [t.clone() if t.untyped_storage().data_ptr() == memory else t for t in tensors], targets, strict=True
    ):
        target.copy_(tensor)


def _is_there(tensor: Tensor, target: Tensor) -> bool:
    return tensor.data_ptr() == target.data_ptr() and tensor.is_contiguous()
