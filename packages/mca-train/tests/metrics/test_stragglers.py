"""Detection of slow ranks."""

from types import SimpleNamespace

import pytest
import torch

from mca_train.metrics.stragglers import Stragglers, slowest


def times(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float64)


def test_ranks_that_differ_little_are_not_slow():
    assert slowest(times((0.01, 0.5), (0.012, 0.55), (0.01, 0.52), (0.011, 0.5)), 1, 2.0) is None


def test_much_more_of_little_is_not_slow():
    assert slowest(times((0.001, 0.5), (0.02, 0.5)), 1, 2.0) is None


def test_a_rank_is_slow_beyond_a_tenth_of_the_step_and_1_3_times_the_others():
    assert slowest(times((0, 1.0), (0, 1.3)), 1, 2.0) is None, "exactly 1.3 times"
    assert slowest(times((0, 1.0), (0, 1.31)), 1, 2.0) is not None
    assert slowest(times((0, 0.0), (0, 0.5)), 1, 5.0) is None, "exactly a tenth of the step"
    assert slowest(times((0, 0.0), (0, 0.51)), 1, 5.0) is not None


def test_a_rank_that_waits_for_its_data_is_slow():
    found = slowest(times((0.01, 0.5), (0.9, 0.5), (0.01, 0.5), (0.02, 0.5)), 2, 2.0)
    assert found is not None
    assert (found.rank, found.what, found.alike) == (1, 0, 0)
    assert (found.seconds, found.typical) == pytest.approx((0.9, 0.01))


def test_forward_passes_are_compared_within_a_stage():
    uneven = times((0, 0.2), (0, 0.2), (0, 0.9), (0, 0.9))
    assert slowest(uneven, 2, 2.0) is None
    assert slowest(uneven, 4, 2.0) is None, "a rank alone in its stage is compared with nobody"
    uneven[3, 1] = 1.6
    found = slowest(uneven, 2, 2.0)
    assert found is not None
    assert (found.rank, found.what) == (3, 1)


def test_neighbours_that_wait_for_each_other_are_counted():
    slow = times(*[(0, 0.9)] * 2, *[(0, 0.3)] * 6)
    found = slowest(slow, 1, 1.0)
    assert found is not None
    assert (found.rank, found.alike) == (0, 1)


def test_all_ranks_find_the_same_one_though_their_clocks_differ(monkeypatch):
    """It speaks to the others: with clocks on both sides of the border one rank alone would, and wait for ever."""
    reading, clocks = (
        (0.01, 0.111),
        (1.0, 1.02),
    )  # 0.101 s behind: a tenth of the one's step, not of the other's
    rows = torch.tensor([[each, 0.0, clock] for each, clock in zip(reading, clocks, strict=True)])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda box: box.copy_(rows))
    found = []
    for rank, clock in enumerate(clocks):
        layout = SimpleNamespace(pp=1)
        here = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"), layout=layout)
        one = Stragglers(here)
        monkeypatch.setattr(one, "_warn", lambda *_: None)
        found.append(one.report(1, clock, 1))
    assert found[0] == found[1]


def test_times_are_sent_in_double_precision(monkeypatch):
    """Seconds of a step of 0.1 s would differ in single precision, and one rank is chosen by their differences."""
    sent = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda box: sent.extend(box.tolist()))
    layout, device = SimpleNamespace(pp=1), torch.device("cpu")
    one = Stragglers(SimpleNamespace(rank=1, world_size=2, device=device, layout=layout))
    monkeypatch.setattr(one, "_warn", lambda *_: None)
    one.report(1, 0.1, 1)
    assert sent == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.1]]


def test_the_slowest_of_several_ranks_is_logged_with_its_delay(monkeypatch):
    rows = torch.tensor([[0.01, 0.5, 1.0], [0.41, 0.5, 1.0]])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda box: box.copy_(rows))
    found = []
    for size in (1, 2):
        here = SimpleNamespace(
            rank=0, world_size=size, device=torch.device("cpu"), layout=SimpleNamespace(pp=1)
        )
        one = Stragglers(here)
        monkeypatch.setattr(one, "_warn", lambda *_: None)
        found += [one.report(1, 1.0, 1), one.report(0, 1.0, 1)]
    assert found == [{}, {}, {"slowest_rank": 1, "slowest_rank_behind": 0.4}, {}]


def test_a_rank_is_named_once_as_long_as_it_is_the_slowest(monkeypatch):
    rows, named = [[0.01, 0.5, 1.0], [0.41, 0.5, 1.0]], []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda box: box.copy_(torch.tensor(rows)))
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_, src, device: named.append(src))
    here = SimpleNamespace(
        rank=0, world_size=2, device=torch.device("cpu"), layout=SimpleNamespace(pp=1), is_first=True
    )
    one = Stragglers(here)
    for _ in range(2):
        one.report(1, 1.0, 1)
    rows.reverse()
    one.report(1, 1.0, 2)
    assert named == [1, 0]
