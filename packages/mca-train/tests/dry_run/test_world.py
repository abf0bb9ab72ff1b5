"""A world in which only one rank exists."""

from datetime import timedelta

import pytest
from torch._C._distributed_c10d import FakeProcessGroup

from mca_models.megatron.distributed import parallel
from mca_train.dry_run.fake_process_group import fake_process_group


def test_it_needs_no_options_of_torchs_fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in FakeProcessGroup.__mro__:
        if "options" in vars(owner):
            monkeypatch.delattr(owner, "options")  # as with torch 2.8
    with fake_process_group(0, 2):
        assert parallel.timeout() >= timedelta(minutes=1)
