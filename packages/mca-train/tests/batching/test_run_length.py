"""Length of a run from ``max_steps`` or epochs, at its start and after a resume with another batch size."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.batching.position import RunLength, RunPosition


@dataclass(frozen=True)
class Batches:
    """An epoch of ``samples`` samples in steps of ``size``."""

    samples: int
    size: int

    @property
    def num_steps(self) -> int:
        return -(-self.samples // self.size)

    def steps_after(self, samples: int) -> int:
        return -(-(self.samples - samples) // self.size)


def length(max_steps: int, epochs: float, size: int, position: dict[str, Any], done: int) -> tuple[int, ...]:
    args: Any = SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs)
    found = RunLength.from_arguments(args, Batches(20, size), RunPosition(epoch_samples=20, **position), done)
    return found.max_steps, found.num_epochs, found.schedule_steps, found.schedule_done


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((-1, 3.0, 4, {}, 0), (15, 3, 15, 0)),
        ((-1, 0.3, 4, {}, 0), (2, 1, 2, 0)),
        ((-1, 0.01, 4, {}, 0), (1, 1, 1, 0)),
        ((7, 3.0, 4, {}, 0), (7, 2, 7, 0)),
        # 7 steps of 4 samples are done: one epoch, and 8 samples of the second
        ((-1, 3.0, 4, {"epoch": 1, "samples": 8}, 7), (15, 3, 15, 7)),
        ((12, 3.0, 4, {"epoch": 1, "samples": 8}, 7), (12, 3, 12, 7)),
        # the rest in steps of 2: 6 of this epoch and 10 of the third
        ((-1, 3.0, 2, {"epoch": 1, "samples": 8}, 7), (7 + 16, 3, 30, 14)),
        # a run that is complete is not made longer or shorter
        ((-1, 3.0, 4, {"epoch": 3}, 15), (15, 3, 15, 15)),
        ((-1, 1.0, 4, {"epoch": 1, "samples": 8}, 7), (7, 2, 5, 7)),
        # a callback ended the first epoch 2 steps early: the schedule keeps them, and no epoch is added
        ((-1, 3.0, 4, {"epoch": 1, "extra_steps": -2}, 3), (15, 3, 15, 3)),
    ],
)
def test_the_length_of_a_run(arguments: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    assert length(*arguments) == expected


def test_a_position_counts_steps_that_were_skipped_or_made_again() -> None:
    began = RunPosition(epoch_samples=20, step_samples=8, unit="samples")
    assert began.after_step().after_step().after_step().samples == 20, "the last step is short"
    ended = replace(began, samples=8, epoch_ended=True)
    assert ended.next_epoch(2) == replace(began, epoch=1, extra_steps=-2)
    assert replace(began, samples=16).restart_epoch(2) == replace(began, extra_steps=2)
    assert replace(began, extra_steps=-2).with_step_samples(4) == replace(
        began, step_samples=4, extra_steps=-4
    )
    assert RunPosition(extra_steps=3).with_step_samples(4).extra_steps == 3
