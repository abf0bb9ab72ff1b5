"""When the passes of a schedule run, and what a rank keeps at its peak, by hand."""

import pytest

from mca_train.plan.chunks import PassMemory
from mca_train.plan.memory import Peak, find_peak
from mca_train.plan.schedule import Order, Pass, timeline


def lasting(rank: int, step: Pass) -> float:
    return 1.0 if step.forward else 2.0


def test_passes_wait_for_their_inputs_and_for_messages_of_other_ranks() -> None:
    """Two stages, two micro-batches; a message takes half a second, and the first stage waits for gradients."""
    order = Order(2, 1, 2)
    ran = timeline([list(order.passes(rank)) for rank in range(2)], 1, lasting, 0.5)
    times = {(run.rank, run.step.forward, run.step.micro_batch): (run.start, run.end) for run in ran}
    assert times == {
        (0, True, 0): (0.0, 1.0),
        (1, True, 0): (1.5, 2.5),
        (1, False, 0): (2.5, 4.5),
        (0, True, 1): (1.0, 2.0),
        (0, False, 0): (5.0, 7.0),
        (1, True, 1): (4.5, 5.5),
        (1, False, 1): (5.5, 7.5),
        (0, False, 1): (8.0, 10.0),
    }


def test_chunks_of_a_rank_follow_those_of_the_last_rank() -> None:
    """One micro-batch through two chunks on each of two ranks: four passes forward, and back."""
    order = Order(2, 2, 1)
    ran = timeline([list(order.passes(rank)) for rank in range(2)], 2, lasting, 0.25)
    starts = {(run.step.forward, run.step.chunk, run.rank): run.start for run in ran}
    forward = [(True, 0, 0), (True, 0, 1), (True, 1, 0), (True, 1, 1)]
    assert [starts[each] for each in forward] == [0.0, 1.25, 2.5, 3.75]
    backward = [(False, 1, 1), (False, 1, 0), (False, 0, 1), (False, 0, 0)]
    assert [starts[each] for each in backward] == [4.75, 7.0, 9.25, 11.5]


@pytest.mark.parametrize(
    ("order", "period", "filling"),
    [
        (Order(4, 1, 9), 16, 5),
        (Order(4, 2, 9), 16, 16),
        (Order(2, 2, 9, 3), 8, 8),
        (Order(2, 2, 9, 10), 20, 20),
    ],
)
def test_a_period_is_four_times_the_stages_or_two_groups(order: Order, period: int, filling: int) -> None:
    assert (order.period, order.filling) == (period, filling)


def test_a_peak_is_the_first_fullest_pass_of_a_rank() -> None:
    """The first of two ranks runs two passes forward before the first one back."""
    needs = [PassMemory(kept=10.0, forward=3.0, backward=5.0)]
    assert find_peak(needs, Order(2, 1, 4), 0) == Peak(20.0, 5.0, 2)
    assert find_peak(needs, Order(2, 1, 4), 1) == Peak(10.0, 5.0, 1)
    assert find_peak([PassMemory(10.0, 7.0, 5.0)], Order(2, 1, 4), 0) == Peak(20.0, 7.0, 2)
    assert Peak(20.0, 7.0, 2).total() == 27.0
