"""Errors that mean that ranks waited for one another in vain."""

import json
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mca_config.errors import McaError
from mca_train.trainer import hang_detector
from mca_train.trainer.hang_detector import HangDetector, Heartbeat, describe_hang, is_timeout

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


def test_a_heartbeat_has_the_phase_and_the_step():
    detector = HangDetector()
    detector._store, detector._rank, detector._main = dist.HashStore(), 1, None
    sent = []
    for phase in ((), ("the optimizer", 7)):
        if phase:
            detector.enter(*phase)
        detector._send()
        sent.append(json.loads(detector._store.get("1")))
    assert [(number, step, what) for number, _, step, what, *_ in sent] == [
        (1, 0, "starting"),
        (2, 7, "the optimizer"),
    ]


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


def stuck(store=None, interval=2.0):
    """Return a detector of rank 0 of 3 in step 7, all of whose ranks have sent a heartbeat."""
    detector = HangDetector()
    detector._store, detector._interval, detector._limit = store or dist.HashStore(), interval, 30.0
    detector._rank, detector._size, detector._main = 0, 3, None
    detector.enter("the optimizer", 7)
    for rank in range(3):
        other = HangDetector()
        other._store, other._rank, other._main = detector._store, rank, None
        other.enter("the optimizer", 7)
        other._send()
    return detector


def test_a_report_comes_after_four_intervals_and_again_after_twice_the_time(clock, caplog):
    detector, begin = stuck(), clock[0]
    reported = []
    for waited in (100, 108, 108.5, 200, 216.5, 217, 433.5, 434.5):
        clock[0] = begin + waited
        caplog.clear()
        detector._report()
        reported += [waited] * len(caplog.records)
    assert reported == [108.5, 217, 434.5]
    assert caplog.messages[0].startswith("the optimizer of step 7 has taken 434 s so far: ")
    assert detector._store.get("finding").decode() in caplog.messages[0]


def test_a_rank_that_goes_on_begins_to_wait_again(monkeypatch):
    """Each heartbeat is sent; a rank that is stuck reports if it is the one to report."""
    detector, calls = HangDetector(), []
    detector._interval, detector._reporting_since, detector._next_report = 2.0, 5.0, 6.0
    monkeypatch.setattr(detector._ended, "wait", lambda seconds: calls.append(seconds) or len(calls) > 14)
    monkeypatch.setattr(detector, "_send", lambda: calls.append("send"))
    answers = iter([(True, False), (True, True), (False, True), (True, True)])
    now = [False, False]

    def is_stuck():
        now[:] = next(answers)
        calls.append((detector._reporting_since, detector._next_report))
        return now[0]

    monkeypatch.setattr(detector, "_is_stuck", is_stuck)
    monkeypatch.setattr(detector, "_is_reporter", lambda: now[1])
    monkeypatch.setattr(detector, "_report", lambda: calls.append("report"))
    detector._run()
    before, after = (5.0, 6.0), (None, 0.0)
    assert calls == [
        *(2.0, "send", before),
        *(2.0, "send", before, "report"),
        *(2.0, "send", before),
        *(2.0, "send", after, "report"),
        2.0,
    ]

    def gone():
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(detector._ended, "wait", lambda seconds: False)
    monkeypatch.setattr(detector, "_send", gone)
    detector._run()


@pytest.mark.parametrize("found", [None, "rank 2 sleeps"])
@pytest.mark.parametrize("error", [None, RuntimeError("Operation timed out!"), RuntimeError("another")])
def test_a_timeout_becomes_an_error_that_names_who_was_waited_for(error, found):
    detector = stuck()
    if found:
        detector._store.set("finding", found)
    detector.__exit__(type(error), error, None)  # it was never entered
    joined = []
    detector._thread = SimpleNamespace(join=joined.append)
    if error is not None and is_timeout(error):
        with pytest.raises(McaError) as raised:
            detector.__exit__(type(error), error, None)
        reason = found or "another rank did not arrive"
        assert str(raised.value) == f"the optimizer of step 7: {reason} (waited for 60 s, ddp_timeout)"
        assert raised.value.__cause__ is error
    else:
        detector.__exit__(type(error), error, None)
    assert joined == [2.0] and detector._thread is None and detector._ended.is_set()


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (False, "rank 0, which holds the rendezvous store, has stopped reporting"),
        (True, "another rank did not arrive"),
    ],
)
def test_a_store_that_does_not_answer_is_that_of_a_stopped_rank(kept, reason, monkeypatch):
    detector, done = stuck(interval=0.01), threading.Event()
    monkeypatch.setattr(detector, "_read_finding", lambda report: done.wait(60))
    monkeypatch.setattr(hang_detector.rendezvous, "has_kept_store", lambda: kept)
    assert detector._finding() == f"the optimizer of step 7: {reason}"
    done.set()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_busy_ranks_are_described_by_the_first_of_them(number):
    beats = [
        Heartbeat(rank, 1, "host", 7, "reading the batch", "a.py:1 (f)", False) for rank in range(number)
    ]
    more = f" and {number - 1} more" if number > 1 else ""
    words = f"rank 0 on host{more} in reading the batch of step 7: a.py:1 (f)"
    assert describe_hang(beats, []) == words


def test_at_most_four_of_each_kind_are_described():
    apart = [Heartbeat(rank, 1, "host", 7, "loading", f"a.py:{rank} (f)", False) for rank in range(6)]
    assert describe_hang(apart, []).count("loading") == 4
    assert describe_hang(apart, range(6)).count("stopped reporting") == 4
    assert describe_hang([None] * 6, []) == "6 ranks (0, 1, 2, 3, ...): training has not started there"
    assert describe_hang([None] * 4, []) == "4 ranks (0, 1, 2, 3): training has not started there"
