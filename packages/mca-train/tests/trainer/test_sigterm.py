"""Stop step of ranks that exchange in the background: two of them, of which this one only sees its own messages."""

from types import SimpleNamespace

import pytest

from mca_train.trainer import sigterm
from mca_train.trainer.sigterm import StopSignal


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock, and a second rank that never gets a signal."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(sigterm, "time", clock)
    monkeypatch.setattr(sigterm.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        sigterm.dist, "all_reduce", lambda *args, **options: SimpleNamespace(wait=lambda: None)
    )
    return clock


def test_a_stop_comes_one_step_after_the_signal(seconds: SimpleNamespace) -> None:
    with StopSignal() as signal:
        assert [signal.agreed() for _ in range(3)] == [False] * 3
        signal._handle(15, None)
        assert [signal.agreed() for _ in range(2)] == [False, True] and signal.stopped
    with signal:
        assert not signal.stopped and not signal.agreed()


def test_the_handler_before_is_back_afterwards(seconds: SimpleNamespace) -> None:
    before = sigterm.signal.getsignal(15)
    with StopSignal() as stop:
        assert sigterm.signal.getsignal(15) == stop._handle
    assert sigterm.signal.getsignal(15) == before


def test_a_second_signal_ends_the_process_with_the_status_of_shells(
    seconds: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(sigterm.os, "_exit", ended.append)
    signal = StopSignal()
    for seconds.now in (0.0, 0.5, 5.0, 10.0):
        signal._handle(15, None)
    assert ended == [128 + 15] * 2
