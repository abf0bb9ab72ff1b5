"""Ranks that are started anew find each other, and nobody of an earlier attempt."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from mca_models.megatron.distributed.rendezvous import next_attempt


@pytest.fixture(scope="module")
def connections() -> Iterator[list]:
    """Connections to one server."""
    from torch.distributed import TCPStore

    patience = timedelta(seconds=120)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience)
    yield [TCPStore("127.0.0.1", server.port, is_master=False, timeout=patience) for _ in range(9)]


@pytest.fixture
def clients(connections, request) -> list:
    """Connections to one store, as ranks have them: each test uses other keys."""
    from torch.distributed import PrefixStore

    return [PrefixStore(request.node.name, each) for each in connections]


def started(clients: list, ranks: dict[int, int], size: int) -> dict[int, "Future[int]"]:
    """Return the state of each rank after the start, by its client."""
    pool = ThreadPoolExecutor(len(ranks))
    return {rank: pool.submit(next_attempt, clients[use], rank, size) for use, rank in ranks.items()}


def numbers(futures: dict[int, "Future[int]"]) -> set[int]:
    return {future.result(timeout=120) for future in futures.values()}


def test_every_start_of_all_ranks_has_a_number(clients):
    for number in (1, 2, 3):
        assert numbers(started(clients, {0: 0, 1: 1, 2: 2}, 3)) == {number}


def test_a_world_may_grow_and_shrink(clients):
    assert numbers(started(clients, {0: 0, 1: 1}, 2)) == {1}
    assert numbers(started(clients, {0: 0}, 1)) == {2}
    assert numbers(started(clients, {0: 0, 1: 1, 2: 2}, 3)) == {3}


def test_a_rank_that_comes_before_rank_0_does_not_enter_what_is_over(clients):
    assert numbers(started(clients, {0: 0, 1: 1, 2: 2}, 3)) == {1}
    early = started(clients, {3: 1, 4: 2}, 3)
    assert not any(future.done() for future in early.values())
    assert numbers(early | started(clients, {5: 0}, 3)) == {2}


class Killed(Exception):
    """Exception that ends a rank while it waits."""


class Dying:
    """A connection whose rank is killed when it waits for others."""

    def __init__(self, client) -> None:
        self.add, self.set, self.check = client.add, client.set, client.check

    def wait(self, keys: list[str]) -> None:
        if keys[0].endswith("full"):
            raise Killed

    def get(self, _: str) -> bytes:
        raise Killed


def test_an_attempt_that_ended_before_all_had_come_is_left(clients):
    for rank in (0, 1):  # the third one has died before it came
        with pytest.raises(Killed):
            next_attempt(Dying(clients[rank]), rank, 3)
    early = started(clients, {3: 1, 4: 2}, 3)
    assert not any(future.done() for future in early.values())
    assert numbers(early | started(clients, {5: 0}, 3)) == {2}
