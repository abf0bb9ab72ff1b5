import json
import os
import signal
import time
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_train.checkpoint import output_lock
from mca_train.checkpoint.output_lock import NAME, OutputLock


def forked(work):
    """A process that does ``work`` and then sleeps; returned when the work is done."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        work()
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return pid


def killed(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def no_waiting(monkeypatch):
    def slept(seconds):
        raise AssertionError(f"waits {seconds} s where there is nothing to wait for")

    monkeypatch.setattr(time, "sleep", slept)


def test_one_run_at_a_time_and_nothing_left(tmp_path, no_waiting):
    place = tmp_path / "a" / "b"
    lock = OutputLock(place)
    lock.take()
    with pytest.raises(McaError, match=rf"b is used by another run \(process {os.getpid()} on "):
        OutputLock(place).take()
    lock.verify()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def unread(file, monkeypatch):
    def refuse(self, **_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(file), "read_text", refuse)


LOST = {
    "was removed, so": lambda file, _: file.unlink(),
    r"cannot be read \(Input/output error\), so": unread,
    "was taken by another run; ": lambda file, _: file.write_bytes(b"\xff{"),
}


@pytest.mark.parametrize("reported", LOST)
def test_why_a_run_lost_its_lock_is_told(reported, tmp_path, monkeypatch):
    lock = OutputLock(tmp_path)
    lock.take()
    with (
        monkeypatch.context() as patch,
        pytest.raises(McaError, match=f"^output_dir: .*{reported}.*this run ends"),
    ):
        LOST[reported](tmp_path / NAME, patch)
        lock.verify()
    lock.release()


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(McaError, match=r"cannot be written \(No space left on device"):
            OutputLock(tmp_path / "run").take()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["close", "fstat", "unlink"])
def test_giving_it_back_never_fails(call, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(5, "Input/output error")

    lock = OutputLock(tmp_path / "run")
    lock.take()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        lock.release()
    left = [tmp_path / "run" / NAME] if call != "close" else []
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == left
    reported = [f"{file} cannot be deleted; the next run takes it over (Input/output error)" for file in left]
    assert [record.getMessage() for record in caplog.records] == reported
    OutputLock(tmp_path / "run").take()


def test_a_killed_run_keeps_no_lock(tmp_path, request):
    killed(forked(OutputLock(tmp_path).take))
    assert (tmp_path / NAME).exists()
    request.getfixturevalue("no_waiting")
    lock = OutputLock(tmp_path)
    lock.take()
    lock.release()


def test_ranks_of_a_killed_launcher_keep_it_until_they_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(output_lock, "_LINGER", 0.5)
    ranks = tmp_path / "rank"

    def launch():
        OutputLock(tmp_path / "run").take()
        ranks.write_text(str(forked(lambda: None)))

    killed(forked(launch))
    with pytest.raises(McaError, match="is used by another run"):
        OutputLock(tmp_path / "run").take()
    monkeypatch.setattr(output_lock, "_LINGER", 60)
    os.kill(int(ranks.read_text()), signal.SIGKILL)
    OutputLock(tmp_path / "run").take()


def elsewhere(folder):
    """The record of a run whose lock this machine does not see."""
    (folder / NAME).write_text(json.dumps({"process": 1, "machine": "node7", "boot": "x", "since": "noon"}))
    return folder / NAME


def test_a_run_elsewhere_is_taken_over_and_ends_before_it_saves(tmp_path, no_waiting, caplog):
    file = elsewhere(tmp_path)
    lock = OutputLock(tmp_path)
    lock.take()
    assert "taken over from another run (process 1 on node7, since noon)" in caplog.text
    lock.verify()
    elsewhere(tmp_path)  # a later run there, whose machine does not see this lock
    with pytest.raises(McaError, match=r"was taken by another run .*node7.*; this run ends"):
        lock.verify()
    lock.release()
    assert file.exists(), "of the other one"


def test_on_a_file_system_without_locks_one_machine_has_one_run(tmp_path, monkeypatch, no_waiting):
    monkeypatch.setattr(output_lock, "_lock", lambda fd: None)
    killed(forked(OutputLock(tmp_path).take))
    lock = OutputLock(tmp_path)
    lock.take()
    with pytest.raises(McaError, match="is used by another run"):
        OutputLock(tmp_path).take()
    lock.verify()


def test_a_process_has_one_start_however_much_memory_it_takes():
    before = output_lock._start_time(os.getpid())
    kept = bytearray(64 << 20)
    assert before and output_lock._start_time(os.getpid()) == before
    del kept
    child = forked(lambda: time.sleep(0.02))
    assert output_lock._start_time(child) != before
    killed(child)
    assert output_lock._start_time(child) == ""


def test_a_process_may_have_brackets_in_its_name():
    child = forked(lambda: Path("/proc/self/comm").write_text("a) b) S 1"))
    plain = forked(lambda: None)
    found, expected = (output_lock._start_time(each) for each in (child, plain))
    assert found.isdigit() and 0 <= int(expected) - int(found) < 6000  # a minute
    for each in (child, plain):
        killed(each)


def test_a_lock_holds_the_record_of_its_run_alone(tmp_path):
    """A killed run may have left a longer one."""
    (tmp_path / output_lock.NAME).write_text(json.dumps({"process": 1, "other": "x" * 1000}))
    lock = OutputLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / output_lock.NAME).read_text()) == output_lock._record()
    lock.verify()
    lock.release()
    lock = OutputLock(tmp_path)
    lock.take()
    assert not (tmp_path / output_lock.NAME).stat().st_mode & 0o111
    lock.release()
    assert not list(tmp_path.iterdir())
