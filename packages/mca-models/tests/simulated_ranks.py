"""Ranks as threads of one process: collectives and messages between them, for code that takes its group as given."""

import queue
import threading
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor

from mca_config.errors import McaError

_SECONDS = 10.0
"""Time after which a rank that waits for another one fails."""


class Message(NamedTuple):
    """Stand-in for ``torch.distributed.P2POp``."""

    op: Any
    tensor: Tensor
    peer: int


class _Receive(NamedTuple):
    tensor: Tensor
    sent: "queue.Queue[Tensor]"

    def wait(self) -> None:
        values = self.sent.get(timeout=_SECONDS)
        assert values.shape == self.tensor.shape and values.dtype == self.tensor.dtype
        self.tensor.copy_(values)


class SimulatedRanks:
    """A process group of ``count`` threads, which replaces functions of ``torch.distributed``."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count, self._here = count, threading.local()
        self._barrier = threading.Barrier(count)
        self._slots: list[Any] = [None] * count
        pairs = product(range(count), repeat=2)
        self._sent: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in pairs}
        self.messages: list[tuple[int, int]] = []
        for name in ("all_reduce", "batch_isend_irecv"):
            monkeypatch.setattr(torch.distributed, name, getattr(self, name))
        monkeypatch.setattr(torch.distributed, "P2POp", Message)

    def rank(self) -> int:
        """Return the rank of the calling thread."""
        number: int = self._here.rank
        return number

    def size(self) -> int:
        """Return the number of ranks."""
        return self._count

    def run(self, compute: Callable[[int], Any]) -> list[Any]:
        """Return ``compute(rank)`` of every rank; an exception is the result of its rank."""
        results: list[Any] = [None] * self._count

        def work(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = compute(rank)
            except Exception as error:
                results[rank] = error
                if not isinstance(error, McaError):  # which all ranks raise together
                    self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def all_reduce(self, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        """Reduce ``tensor`` over all ranks, in place."""
        assert group in (None, self)
        self._slots[self.rank()] = tensor.clone()
        self._barrier.wait(_SECONDS)
        everyone = torch.stack(list(self._slots))
        result = everyone.amax(0) if op == torch.distributed.ReduceOp.MAX else everyone.sum(0)
        self._barrier.wait(_SECONDS)
        tensor.copy_(result)

    def batch_isend_irecv(self, messages: list[Message]) -> list[_Receive]:
        """Send at once, and return what is received when it is waited for."""
        me, receives = self.rank(), []
        for message in messages:
            if message.op is torch.distributed.isend:
                self.messages.append((me, message.peer))
                self._sent[me, message.peer].put(message.tensor.clone())
            else:
                receives.append(_Receive(message.tensor, self._sent[message.peer, me]))
        return receives
