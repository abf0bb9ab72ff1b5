"""Moves between strided runs, against the list of all their elements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_models.storage.byte_ranges import Gather, Move, in_unit_steps, plan_gather, strided_runs
from mca_models.storage.copy_plan import _rectangles

small = st.integers(1, 5)
moves = st.builds(
    Move, st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), small, small, small, small, small, small
)


def elements(move: Move) -> list[tuple[int, int]]:
    """Return the position of each element at the source and at the target, run by run."""
    return [
        (
            move.source + k * move.source_stride + i * move.source_step,
            move.target + k * move.target_stride + i * move.target_step,
        )
        for k in range(move.repeat)
        for i in range(move.run)
    ]


@settings(max_examples=50, deadline=None)
@given(moves)
def test_a_move_spans_its_first_to_its_last_element(move: Move) -> None:
    sources, targets = zip(*elements(move), strict=True)
    assert move.source_span == max(sources) - min(sources) + 1
    assert move.target_span == max(targets) - min(targets) + 1


@pytest.mark.parametrize(
    ("move", "reads", "writes"),
    [
        (Move(0, 3, 4, 5, 1, 9, 9), True, True),
        (Move(0, 3, 4, 5, 2, 5, 5), True, True),
        (Move(0, 3, 4, 5, 2, 5, 6), True, False),
        (Move(0, 3, 4, 5, 2, 6, 5), False, True),
        (Move(0, 3, 4, 5, 1, 5, 5, 2, 1), False, True),
        (Move(0, 3, 4, 5, 1, 5, 5, 1, 2), True, False),
        (Move(0, 3, 4, 1, 5, 2, 2), False, False),
    ],
)
def test_elements_lie_in_order_where_each_follows_the_one_before(
    move: Move, reads: bool, writes: bool
) -> None:
    sources, targets = zip(*elements(move), strict=True)
    assert reads == (list(sources) == list(range(3, 3 + len(sources)))) == move.reads_in_order
    assert writes == (list(targets) == list(range(4, 4 + len(targets)))) == move.writes_in_order


@settings(max_examples=40, deadline=None)
@given(moves)
def test_moves_in_unit_steps_have_the_same_elements(move: Move) -> None:
    parts = list(in_unit_steps(move))
    assert sorted(pair for part in parts for pair in elements(part)) == sorted(elements(move))
    assert all(part.source_step == part.target_step == 1 and part.part == move.part for part in parts)
    assert len(parts) == (1 if move.source_step == move.target_step == 1 else move.run)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 3), st.integers(1, 2)), max_size=8))
def test_joined_runs_have_the_elements_of_all_runs(steps: list[tuple[int, int, int]]) -> None:
    source, target, runs = 20, 0, []
    for back, on, length in steps:
        source, target = source + back, target + on + 2
        runs.append((source, target, length))
    found = [Move(0, *fields) for fields in strided_runs(np.array(runs, int).reshape(-1, 3).T)]
    expected = [(source + i, target + i) for source, target, length in runs for i in range(length)]
    assert [pair for move in found for pair in elements(move)] == expected


def test_runs_at_constant_distances_are_one_move() -> None:
    runs = np.array([(5, 0, 2), (8, 4, 2), (11, 8, 2), (40, 12, 2), (39, 16, 2), (50, 20, 3)]).T
    assert list(strided_runs(runs)) == [
        (5, 0, 2, 3, 3, 4),
        (40, 12, 2, 1, 2, 2),
        (39, 16, 2, 1, 2, 2),
        (50, 20, 3, 1, 3, 3),
    ]
    repeated = np.array([(5, 0, 2), (5, 4, 2), (5, 8, 2)]).T
    assert list(strided_runs(repeated)) == [(5, 0, 2, 3, 0, 4)]


def test_a_gather_reads_each_part_from_its_start_and_writes_zeros_where_nothing_is() -> None:
    """Two parts of 3 and 2 blocks with a gap between them; the target ends with two blocks of padding."""
    positions = np.array([0, 1, 2, 4, 5])
    gather = plan_gather(positions, np.array([[3, 4, 0], [2, -1, -1]]), [0, 4], 10)
    assert gather == Gather(
        (2, 30),
        (Move(1, 0, 0, 20, 1, 20, 20), Move(0, 0, 20, 10, 2, 20, 10)),
        ((40, 60),),
    )
    assert gather.size == 60
    padded = plan_gather(positions, np.array([-1, 0, 1, -1]), [0, 4], 10)
    assert (padded.moves, padded.zeros) == ((Move(0, 0, 10, 20, 1, 20, 20),), ((0, 10), (30, 40)))


@settings(max_examples=100, deadline=None)
@given(
    *(st.integers(1, 6), st.integers(0, 12), st.integers(0, 12), st.integers(1, 14), st.integers(1, 4)),
    *(st.integers(0, 9), st.integers(0, 9), st.booleans()),
)
def test_rectangles_have_the_elements_of_their_move(
    columns: int, source: int, target: int, run: int, repeat: int, gap: int, other_gap: int, of_source: bool
) -> None:
    """Rectangles lie in a matrix of some columns, on either side of the move."""
    move = Move(2, source, target, run, repeat, run + gap, run + other_gap)
    found = []
    for block in _rectangles(move, columns, source=of_source):
        assert block.part == 2 and block.column + block.width <= columns
        found += [
            (
                (block.row + row * block.step) * columns + block.column + column,
                block.other + row * block.other_stride + column,
            )
            for row in range(block.height)
            for column in range(block.width)
        ]
    expected = elements(move) if of_source else [(target, source) for source, target in elements(move)]
    assert sorted(found) == sorted(expected)
