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


@pytest.fixture
def clock(monkeypatch):
    """Return the time of the detector as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(hang_detector.time, "monotonic", lambda: now[0])
    return now


def test_a_phase_is_stuck_after_a_multiple_of_its_longest_time(clock):
    """At least ``_MIN_WAIT``; ``_FIRST_TIME`` if the phase is new; and never later than the limit."""
    detector = HangDetector()
    detector._limit = 10_000.0
    longest = hang_detector._MIN_WAIT
    detector.enter("a", 1)
    for duration in (longest, 1.0):
        clock[0] += duration
        detector.enter("b", 1)
        clock[0] += 1
        detector.enter("a", 2)
    first, short = hang_detector._FIRST_TIME, hang_detector._MIN_WAIT
    waits = {"a": hang_detector._FACTOR * longest, "b": short, "new": first}
    for what, seconds in waits.items():
        detector.enter(what, 3)
        found = []
        for waited in (seconds, seconds + 0.1):
            detector._since = clock[0] - waited
            found.append(detector._is_stuck())
        assert found == [False, True], what
        detector._since = clock[0]
    detector._limit = 5.0
    detector._since = clock[0] - 5.1
    assert detector._is_stuck()


def test_a_rank_is_silent_after_three_intervals_without_a_new_heartbeat(clock):
    detector = HangDetector()
    detector._store, detector._interval = dist.HashStore(), 2.0
    other = HangDetector()
    other._store, other._rank, other._main = detector._store, 1, None
    assert not detector._is_silent(1)
    for seconds, sends, silent in (
        (6.0, False, False),
        (0.1, False, True),
        (0.1, True, False),
        (6.1, False, True),
    ):
        clock[0] += seconds
        if sends:
            other.enter("forward", 7)
            other._send()
        assert detector._is_silent(1) is silent, (seconds, sends)
    heartbeat = detector._heartbeat(1)
    assert (heartbeat.rank, heartbeat.number, heartbeat.step, heartbeat.what) == (1, 1, 7, "forward")


@pytest.mark.parametrize(
    ("rank", "silent", "reports"),
    [(0, False, True), (0, True, True), (1, True, False), (2, True, True), (2, False, False)],
)
def test_the_first_rank_reports_or_the_last_if_that_is_silent(rank, silent, reports, monkeypatch):
    detector = HangDetector()
    detector._rank, detector._size = rank, 3
    monkeypatch.setattr(detector, "_is_silent", lambda other: other == 0 and silent)
    assert detector._is_reporter() is reports
