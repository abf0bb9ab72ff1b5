import multiprocessing
import os
import signal
import tempfile
import time

import pytest

from mca_config.errors import McaError
from mca_train.launch.launcher import scratch_folder


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_it_is_private_and_gone_with_the_run(place):
    with scratch_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
    assert list(place.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next_one_and_nothing_else(place, caplog):
    names = [
        f"mca-train-{os.getuid()}",
        f"mca-train-{os.getuid()}.partial-0a1b2c3d",
        "mca-train-xyz",
        "pymp-abc",
    ]
    for name in names:
        (place / name).mkdir()
        (place / name / "mine").touch()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with scratch_folder():
            os.write(write, b"x")
            time.sleep(60)
        os._exit(1)
    os.read(read, 1)
    try:
        with scratch_folder():
            assert len(list(place.iterdir())) == len(names) + 2, "that of a living run stays"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert len(list(place.iterdir())) == len(names) + 1
    with caplog.at_level("INFO"), scratch_folder():
        pass
    assert caplog.messages == [], "a leftover in the temporary directory is no news for a user"
    assert sorted(path.name for path in place.iterdir()) == sorted(names)


def test_sockets_of_multiprocessing_are_in_it(place):
    with scratch_folder() as folder:
        manager = multiprocessing.Manager()
        assert str(manager.address).startswith(f"{folder}/")
        manager.shutdown()
        assert [path.name for path in place.iterdir()] == [folder.name]
    assert not multiprocessing.util.get_temp_dir().startswith(str(folder))


def test_a_temporary_directory_that_is_not_there_is_one_line(place):
    place.rmdir()
    with pytest.raises(McaError, match=f"temporary directory {place}: cannot be written"), scratch_folder():
        pass
