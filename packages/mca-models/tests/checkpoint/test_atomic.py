import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_models.checkpoint import PartialDirectory, atomic_directory

WRITER = """
import sys, time
from pathlib import Path
from mca_models.checkpoint import PartialDirectory
partial = PartialDirectory(Path(sys.argv[1]))
(partial.path / "half").write_text("x")
print("ready", flush=True)
time.sleep(60)
"""


def test_complete_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with atomic_directory(target) as partial:
        (partial / "file").write_text("x")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["file"]
    with pytest.raises(KeyError), atomic_directory(tmp_path / "c") as partial:
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_an_empty_directory_is_replaced_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with atomic_directory(tmp_path / "empty") as partial:
        (partial / "file").touch()
    with pytest.raises(McaError, match="not empty"), atomic_directory(tmp_path / "empty"):
        raise AssertionError
    (tmp_path / "file").touch()
    with pytest.raises(McaError, match="not a directory"), atomic_directory(tmp_path / "file"):
        raise AssertionError


def test_overwrite_exchanges_whole_directories(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_directory(tmp_path / "x", overwrite=True) as partial:
            (partial / text).touch()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["new"]


def test_leftovers_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    target = tmp_path / "x [1]"  # a name with glob characters
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        assert len(list(tmp_path.iterdir())) == 2
        os.kill(writers[0].pid, signal.SIGKILL)
        writers[0].wait()
        time.sleep(0.05)
        partial = PartialDirectory(target)
        assert len(list(tmp_path.iterdir())) == 2  # the living one's and the new one
        partial.publish()
        assert target.is_dir()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(McaError, match="cannot be written"):
        PartialDirectory(tmp_path / "file" / "below")
