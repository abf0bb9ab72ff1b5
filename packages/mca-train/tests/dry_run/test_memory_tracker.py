"""Counts of a dry run, and its known values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mca_train.dry_run.fake_values import FakeValues
from mca_train.dry_run.tracker import ModuleNames, Tracker


def test_a_storage_is_counted_from_the_operation_that_makes_it_until_its_last_view_goes() -> None:
    with Tracker(ModuleNames()) as tracker:
        made = torch.ones(256)
        assert tracker.tally.live == 1024
        part = made[:2]
        del made
        assert tracker.tally.live == 1024
        del part
        assert tracker.tally.live == 0
        written = torch.tensor([1.0, 2.0])
        assert tracker.tally.live == written.nbytes


def test_memory_of_a_library_is_not_counted_though_its_views_are_seen() -> None:
    unseen = torch.zeros(1024)
    with Tracker(ModuleNames()) as tracker:
        views = unseen.chunk(2)  # as gloo takes its part of a sum that it has copied
        unseen.add_(1)
        assert len(views) == 2
        assert tracker.tally.live == tracker.tally.peak.bytes == 0
        tracker.add(unseen)
        assert tracker.tally.live == unseen.nbytes


@pytest.mark.parametrize("size", [4, 100_000])
def test_values_that_may_decide_a_size_are_known(size: int) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FakeValues(fake):
        counted = torch.arange(size)
        assert int(counted.max()) == size - 1
        assert int((counted * 2).sum()) == size * (size - 1)
        assert len(counted[counted >= size - 3]) == 3


def test_tables_of_many_fractions_are_not_computed() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FakeValues(fake):
        angles = torch.outer(torch.arange(1000.0), torch.arange(64.0))
        assert float(angles.cos().sum()) == 1.0
        assert float(torch.arange(8.0).sum()) == 28.0
