"""Errors that mean that ranks waited for one another in vain."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from mca_train.trainer import hang_detector
from mca_train.trainer.hang_detector import HangDetector, is_timeout

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("Operation timed out!"), True),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), True),
        (dist.DistStoreError("wait timeout after 5000ms, keys: /x"), True),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"
            ),
            False,
        ),
        (dist.DistBackendError("NCCL error: unhandled system error"), False),
        (RuntimeError("DataLoader timed out after 30 seconds"), False),
        (RuntimeError("read timeout of the dataset's host"), False),
        (OSError("timed out"), False),
        (None, False),
    ],
)
def test_only_ranks_that_wait_for_ranks_have_timed_out(error, expected):
    assert is_timeout(error) is expected


@pytest.mark.parametrize(("rank", "level"), [(0, "WARNING"), (1, "ERROR")])
def test_the_last_rank_reports_above_the_level_that_is_filtered(rank, level, caplog):
    detector = HangDetector()
    detector._rank, detector._size, detector._interval = rank, 2, 0.0
    detector._reporting_since = detector._since - 1
    detector._store = dist.HashStore()
    detector._report()
    assert [record.levelname for record in caplog.records] == [level]


@pytest.mark.parametrize(("timeout", "interval"), [(2, 0.1), (40, 2.0), (10**6, hang_detector._INTERVAL)])
def test_heartbeats_are_at_most_a_twentieth_of_the_timeout_apart(timeout, interval, monkeypatch):
    monkeypatch.setattr(hang_detector.parallel, "timeout", lambda: timedelta(seconds=timeout))
    detector = HangDetector()
    assert detector._periods() == (interval, timeout / 2)
