"""Counts of a step stay on their device until a log is due."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meters import LossMeter, StepRows


class Called(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_copies_nothing_to_the_device(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LossMeter(rank)
    batch: Any = SimpleNamespace(
        num_tokens=7, num_samples=2, squares=25, image_tokens=3, audio_tokens=1, checksum=0
    )
    loss = StepLoss(torch.tensor(6.0), torch.tensor(4))
    for _ in range(2):
        with Called() as called:
            meter.add(loss, batch)
        assert "aten::lift_fresh" not in called.names, "made of numbers of the host"
    monkeypatch.setattr("mca_train.groups.sum_over_data", lambda rows: rows)
    report = meter.flush()
    assert report.losses == [1.5, 1.5]
    counted = (report.num_tokens, report.num_samples, report.squares)
    counted += (report.image_tokens, report.audio_tokens)
    assert counted == ((14, 4, 50, 6, 2) if rank == 0 else (0,) * 5)


def test_an_interval_that_is_cut_adds_up_to_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mca_train.groups.sum_over_data", lambda rows: rows)
    steps: list[tuple[StepLoss, Any]] = [
        (
            StepLoss(torch.tensor(float(number)), torch.tensor(number + 1)),
            SimpleNamespace(
                num_tokens=number, num_samples=2, squares=5, image_tokens=0, audio_tokens=0, checksum=0
            ),
        )
        for number in range(3)
    ]
    whole, before, after = LossMeter(0), LossMeter(0), LossMeter(0)
    for step in steps:
        whole.add(*step)
    before.add(*steps[0])
    after.restore(json.loads(json.dumps(before.state())))
    assert after.samples_before == 2
    for step in steps[1:]:
        after.add(*step)
    expected, found = whole.flush(), after.flush()
    assert found.losses == expected.losses == [0.0, 0.5, 2 / 3]
    assert (found.num_tokens, found.num_samples) == (expected.num_tokens, expected.num_samples) == (3, 6)
    assert found.seconds > 0


def test_rows_of_a_checkpoint_are_restored_to_the_bit() -> None:
    rows = StepRows(2)
    rows.restore([[0.1, 1 / 3]])
    assert rows.flush(lambda values: values).tolist() == [[0.1, 1 / 3]]


@pytest.mark.parametrize(
    ("seconds", "steps", "speed"),
    [
        (4.0, 2, {"tokens_per_second": 25.0, "samples_per_second": 1.5, "step_time": 2.0}),
        (7.0, 3, {"tokens_per_second": 14.3, "samples_per_second": 0.857, "step_time": 2.3333}),
        (0.0, 2, {}),
        (4.0, 0, {}),
    ],
)
def test_the_speed_is_of_the_steps_and_none_without_time(
    seconds: float, steps: int, speed: dict[str, float]
) -> None:
    meter = LossMeter(0)
    report = replace(meter.flush(), num_steps=steps, num_tokens=100, num_samples=6, seconds=seconds)
    assert report.speed() == speed
