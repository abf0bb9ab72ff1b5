"""Parameters on their way from the ranks that hold them to those that want them as Hugging Face tensors.

A bucket at a time: the messages of the next one are under way while the last one is used. Each rank gets the pieces
of its own replica, straight to where they stay; what `buckets` planned is carried out here.
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
"""This rank's piece of a parameter by its canonical name; None if it holds none."""


@dataclass(frozen=True)
class WeightSource:
    """Who holds what.

    Args:
        rank_context: Where this rank stands.
        config: Of the model, with its layout.
        piece: What this rank holds.
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
        """The rank from which this one gets piece ``number``: one of its own replica, and what is not cut has it."""
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
        """Which piece this rank has, if it holds the parameter."""
        coordinates = self.rank_context.coordinates
        return 0 if param.shard.axis is None else coordinates.tp if param.expert is None else coordinates.etp

    def receivers(self, targets: frozenset[int]) -> Mapping[tuple[bool, bool], list[int]]:
        """Those of ``targets`` that get their pieces from this rank, by whether of experts, and whether not cut."""
        mine = self.rank_context.coordinates
        found: dict[tuple[bool, bool], list[int]] = {(e, w): [] for e, w in product((False, True), repeat=2)}
        for target in sorted(targets):
            coordinates = self._grid.coordinates(target)
            same = ((coordinates.dp, coordinates.cp) == (mine.dp, mine.cp), coordinates.edp == mine.edp)
            alike = (coordinates.tp == mine.tp, coordinates.etp == mine.etp)
            for experts, whole in found:
                if same[experts] and (alike[experts] or not whole):
                    found[experts, whole].append(target)
        return found


@dataclass(frozen=True)
class FilledBucket:
    """A bucket that has arrived.

    Args:
        bucket: What is in it.
        buffer: Its bytes.
    """

    bucket: Bucket
    buffer: Tensor


def stream(source: WeightSource, buckets: Sequence[Bucket]) -> Generator[FilledBucket, None, None]:
    """The buckets that this rank is a target of, filled; collective: all ranks take them to the end.

    Raises:
        McaError: A rank failed, or stopped in the middle: all others say which.
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
    """The messages of ``bucket`` on their way, once every rank is ready for them."""
    transfer = _Transfer(source, bucket, agreement)
    agreement.go_on()
    transfer.post()
    return transfer


class _Agreement:
    """Before each bucket all ranks say whether they go on, so that none waits for one that has left.

    Args:
        rank_context: Where this rank stands.
        count: The buckets.
    """

    def __init__(self, rank_context: RankContext, count: int) -> None:
        self._rank_context, self._left = rank_context, count
        self.over = False

    @contextmanager
    def talking(self) -> Iterator[None]:
        """A block in which torch talks to other ranks: where one of them has died, an error that says so."""
        try:
            yield
        except RuntimeError as error:
            self.over = True
            why = next(iter(str(error).splitlines()), "")
            raise McaError(
                f"the stream of weights broke off on rank {self._rank_context.rank}: another rank was lost ({why:.120})"
            ) from error

    def go_on(self) -> None:
        """This rank is ready for the next bucket.

        Raises:
            McaError: Another one has left.
        """
        self._left -= 1
        if left := self._exchange(0):
            self.over = True
            raise McaError(
                f"rank {left - 1} failed or stopped receiving weights before the last one; all ranks must run "
                "the loop to its end"
            )

    def leave(self) -> None:
        """This rank will take no more. Does nothing after the last bucket, or when the others know."""
        if self.over or self._left <= 0:
            return
        with suppress(McaError):  # whoever is gone has left too
            self._exchange(self._rank_context.rank + 1)
        self.over = True

    def _exchange(self, left: int) -> int:
        box = torch.tensor([left], dtype=torch.int64, device=platform.current_device())
        with self.talking():
            torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MAX)
            return int(box)


class _Transfer:
    """The pieces of one bucket: from this rank to others, and from others into its buffer."""

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
        rows = slot.pieces[number][0] if slot.param.vocab else len(piece)
        return cast_finite(piece.detach()[:rows], slot.dtype, name).contiguous()

    def post(self) -> None:
        """Sends and receives in the background."""
        if self._messages:  # together: two ranks with a piece for each other would wait for ever in NCCL
            with self._agreement.talking():
                self._works = torch.distributed.batch_isend_irecv(self._messages)

    def wait(self) -> None:
        """Until all is sent and there."""
        with self._agreement.talking():
            for work in self._works:
                work.wait()
        self._works, self._messages = [], []

    def finish(self) -> FilledBucket | None:
        """The bucket with its Hugging Face tensors; None where it was only sent from."""
        self.wait()
        if self._buffer is None:
            return None
        for slot in self._bucket.slots:
            _arrange(slot, self._buffer)
        return FilledBucket(self._bucket, self._buffer)


def _piece_views(slot: Slot, buffer: Tensor) -> list[Tensor]:
    """Where the pieces arrive."""
    pieces: list[Tensor] = []
    start = slot.start
    for shape in slot.pieces:
        pieces.append(byte_view(buffer, start, slot.dtype, shape))
        start += pieces[-1].nbytes
    return pieces


def _arrange(slot: Slot, buffer: Tensor) -> None:
    """Puts the Hugging Face tensors of a parameter where its pieces are."""
    pieces = _piece_views(slot, buffer)
    rows = slot.param.shard.axis == 0 and len(slot.param.shard.segments) == 1
    if rows and len(pieces) > 1:  # they lie one after the other
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
