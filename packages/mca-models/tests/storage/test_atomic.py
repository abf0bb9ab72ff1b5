import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_models.storage import atomic, staging_folder
from mca_models.storage.atomic import AtomicDirectory, atomic_directory, exchange, write_file

WRITER = """
import sys, time
from pathlib import Path
from mca_models.storage.atomic import AtomicDirectory
partial = AtomicDirectory(Path(sys.argv[1]))
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


@pytest.mark.parametrize("refused", [False, True])
def test_what_replaces_a_directory_is_for_whom_that_was(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").touch()
    if os.getuid() == 0:
        os.chown(target, 1234, 2345)
    target.chmod(0o2750)
    before = target.stat()
    if refused:

        def refuse(*_: int) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "fchown", refuse)
        monkeypatch.setattr(os, "fchmod", refuse)
    with atomic_directory(target, overwrite=True) as partial:
        (partial / "file").touch()
    after = target.stat()
    assert [path.name for path in target.iterdir()] == ["file"]
    if not refused:
        assert after.st_ino != before.st_ino
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


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
        partial = AtomicDirectory(target)
        assert len(list(tmp_path.iterdir())) == 2  # the living one's and the new one
        partial.publish()
        assert target.is_dir()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(McaError, match=r"below: cannot be written \(.*\); name another directory$"):
        AtomicDirectory(tmp_path / "file" / "below")


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    """A partial folder is known by its marker and its name, not by one of them."""
    for name in ("x.partial-backup", "x.partial-0123abcd", "x.partial-0123abcde"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    for name in ("x.partial-backup", "x.partial-0123abcde"):
        (tmp_path / name / staging_folder.MARKER).touch()
    (tmp_path / "x.partial-76543210").symlink_to(tmp_path / "x.partial-backup")
    with atomic_directory(tmp_path / "x") as partial:
        (partial / "file").touch()
    assert len(list(tmp_path.iterdir())) == 5
    assert len(list(tmp_path.glob("*/mine"))) == 4


def test_a_folder_whose_writer_died_at_its_marker_goes(tmp_path: Path) -> None:
    folder = left_by(tmp_path / "x")
    for entry in (entry for entry in folder.iterdir() if entry.name != staging_folder.MARKER):
        shutil.rmtree(entry)
    (folder / staging_folder.MARKER).write_text("")
    other = tmp_path / "x.partial-01234567"
    other.mkdir()
    (other / staging_folder.MARKER).write_text("a sentence of somebody else")
    staging_folder.remove_leftovers(tmp_path / "x")
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_whose_writer_died_before_its_marker_goes(tmp_path: Path) -> None:
    for name in ("x.partial-01234567", "y.partial-01234567"):
        (tmp_path / name).mkdir()
    (tmp_path / "x.partial-76543210").symlink_to(tmp_path / "y.partial-01234567")
    staging_folder.remove_leftovers(tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.partial-76543210", "y.partial-01234567"]


def test_a_folder_that_another_writer_took_for_left_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, locked = staging_folder._try_lock, []

    def late(fd: int) -> bool:
        if not locked:
            staging_folder.remove_leftovers(tmp_path / "x")
        locked.append(fd)
        return lock(fd)

    monkeypatch.setattr(staging_folder, "_try_lock", late)
    with atomic_directory(tmp_path / "x") as partial:
        (partial / "file").touch()
    assert len(locked) > 1
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "file"]


def test_a_folder_that_is_always_taken_for_left_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []

    def make(self: staging_folder.StagingFolder, path: Path) -> None:
        taken.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(staging_folder.StagingFolder, "_make", make)
    with pytest.raises(FileNotFoundError, match=r"x\.partial-"):
        staging_folder.StagingFolder(tmp_path, "x")
    assert len(set(taken)) == 3


def left_by(target: Path, other: bool = False) -> Path:
    """A folder that a process left which was killed; ``other``: on another machine."""
    held = AtomicDirectory(target, overwrite=True)
    (held.path / "half").touch()
    folder = held.path.parent
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    held.discard()
    copy.rename(folder)
    if other:
        marker = json.loads((folder / staging_folder.MARKER).read_text())
        (folder / staging_folder.MARKER).write_text(json.dumps(marker | {"machine": ["other", "start"]}))
    return folder


def test_a_folder_of_another_machine_stays_until_nothing_has_changed_in_it_for_a_day(tmp_path: Path) -> None:
    folder = left_by(tmp_path / "x", other=True)
    for age, stays in ((23 * 3600, True), (25 * 3600, False)):
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (time.time() - age,) * 2)
        with atomic_directory(tmp_path / f"{age}" / "x"):
            pass
        staging_folder.remove_leftovers(tmp_path / "x")
        assert folder.exists() == stays
    mine = left_by(tmp_path / "x")
    staging_folder.remove_leftovers(tmp_path / "x")
    assert not mine.exists()


def lose_everything(partial: AtomicDirectory) -> None:
    shutil.rmtree(partial.path.parent)


def lose_and_make_anew(partial: AtomicDirectory) -> None:
    shutil.rmtree(partial.path.parent)
    partial.path.mkdir(parents=True)
    (partial.path / "weights").write_bytes(b"1234")


def lose_the_content(partial: AtomicDirectory) -> None:
    shutil.rmtree(partial.path)


def lose_a_file(partial: AtomicDirectory) -> None:
    (partial.path / "weights").unlink()


def cut_a_file(partial: AtomicDirectory) -> None:
    os.truncate(partial.path / "weights", 2)


@pytest.mark.parametrize(
    "harm", [lose_everything, lose_and_make_anew, lose_the_content, lose_a_file, cut_a_file]
)
@pytest.mark.parametrize("exists", [False, True])
def test_only_the_directory_that_was_begun_is_published(
    harm: Callable[[AtomicDirectory], None], exists: bool, tmp_path: Path
) -> None:
    target = tmp_path / "x"
    if exists:
        target.mkdir()
    partial = AtomicDirectory(target)
    (partial.path / "weights").write_bytes(b"1234")
    harm(partial)
    with pytest.raises(McaError, match="convert again"):
        partial.publish({"weights": 4})
    assert list(tmp_path.rglob("*")) == ([target] if exists else [])


def test_small_files_do_not_make_a_lost_directory_anew(tmp_path: Path) -> None:
    partial = AtomicDirectory(tmp_path / "x")
    lose_everything(partial)
    with pytest.raises(McaError, match="No such file"):
        write_file(partial.path / "config.json", b"{}")
    assert not list(tmp_path.iterdir())


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A directory of the same file system, mounted at ``folder``."""
    behind = folder.with_name("behind")
    behind.mkdir()
    done = subprocess.run(["mount", "--bind", str(behind), str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_mount_point_is_filled_and_never_exchanged(tmp_path: Path) -> None:
    (tmp_path / "x y").mkdir()
    with mounted(tmp_path / "x y") as target:
        (target / "lost+found").mkdir()
        for overwrite in (False, True):
            with atomic_directory(target, overwrite=overwrite) as partial:
                (partial / "config.json").touch()
            assert sorted(path.name for path in target.iterdir()) == ["config.json", "lost+found"]
            if not overwrite:
                (target / "config.json").unlink()
        with pytest.raises(McaError, match="mount point"), atomic_directory(target, overwrite=True):
            raise AssertionError
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "lost+found"]


def test_an_empty_directory_keeps_what_it_is(tmp_path: Path) -> None:
    target, link = tmp_path / "x", tmp_path / "link"
    target.mkdir(mode=0o710)
    before = target.stat()
    link.symlink_to(target)
    with atomic_directory(link) as partial:
        assert partial.parent.parent == target
        (partial / "file").touch()
    after = target.stat()
    assert (before.st_ino, before.st_mode, before.st_uid) == (after.st_ino, after.st_mode, after.st_uid)
    assert link.is_symlink() and [path.name for path in target.iterdir()] == ["file"]
    with atomic_directory(link, overwrite=True) as partial:
        (partial / "new").touch()
    assert link.is_symlink() and [path.name for path in link.iterdir()] == ["new"]


FILLER = """
import os, sys
from pathlib import Path
from mca_models.storage.atomic import AtomicDirectory
moves = 0
def move(*words, **options):
    global moves
    if moves == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    moves += 1
    original(*words, **options)
original, os.rename = os.rename, move
partial = AtomicDirectory(Path(sys.argv[1]))
for name in ("mca_config.json", "weights", "config.json"):
    (partial.path / name).write_text("x")
partial.publish()
"""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_an_existing_directory_that_was_filled_halfway_is_no_checkpoint(moves: int, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    assert subprocess.run([sys.executable, "-c", FILLER, str(target), str(moves)]).returncode == -9
    assert len(list(target.iterdir())) == 1 + moves
    assert not (target / "mca_config.json").exists(), "the file that readers look for comes last"
    moved = [path for path in target.iterdir() if path.is_file()]
    assert len(moved) == moves
    if moved:
        with pytest.raises(McaError, match="not empty"):
            AtomicDirectory(target)
    for path in moved:
        path.unlink()
    with atomic_directory(target) as partial:
        (partial / "file").touch()
    assert [path.name for path in target.iterdir()] == ["file"]


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_writers_the_first_to_finish_wins(exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "above" / "x"
    if exists:
        target.mkdir(parents=True)
    first, second = AtomicDirectory(target), AtomicDirectory(target)
    for number, partial in enumerate((first, second)):
        (partial.path / str(number)).touch()
    first.publish()
    with pytest.raises(McaError, match="exists and is not empty"):
        second.publish()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "above", "x"]


def test_parents_that_were_made_for_a_failure_go_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyError), atomic_directory(tmp_path / "a" / "b" / "c" / "d"):
        raise KeyError
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_what_stands_stays_when_its_place_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("mca_models.storage.atomic.sync_directory", broken)
    with atomic_directory(tmp_path / "x") as partial:
        (partial / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "file"]
    assert "could not be synced (Input/output error)" in caplog.text


def test_without_an_exchange_of_the_file_system_the_old_one_steps_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*words: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("mca_models.storage.atomic._exchange", unknown)
    test_overwrite_exchanges_whole_directories(tmp_path)
    folder = left_by(tmp_path / "x")
    (tmp_path / "x").rename(folder / staging_folder.DISPLACED)  # killed between the two steps
    staging_folder.remove_leftovers(tmp_path / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "new"]


def test_an_exchange_that_the_kernel_refuses_has_its_reason(tmp_path: Path) -> None:
    folder = staging_folder.StagingFolder(tmp_path, "x")
    with pytest.raises(FileNotFoundError, match="absent"):
        exchange(folder, tmp_path / "absent")
    folder.remove()


def test_the_descriptor_of_the_directory_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without standard input has it as number 0."""
    made, closed = AtomicDirectory(tmp_path / "a"), list[int]()
    os.close(made._content_fd)
    made._content_fd = 0
    monkeypatch.setattr(atomic, "close", closed.append)
    made.discard()
    made.discard()
    assert closed == [0]


def test_a_folder_that_was_moved_or_replaced_is_not_in_its_place(tmp_path: Path) -> None:
    folder = staging_folder.StagingFolder(tmp_path, "a")
    assert folder.is_in_place()
    folder.path.rename(tmp_path / "moved")
    assert not folder.is_in_place()
    folder.path.mkdir()
    assert not folder.is_in_place()
    folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["moved"] and folder.fd == -1


def test_a_folder_is_idle_since_its_newest_file_changed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for age, name in ((500, "inside/old"), (100, "inside/new"), (300, "file")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    for folder in (tmp_path / "inside", tmp_path):
        os.utime(folder, (time.time() - 900,) * 2)
    assert 99 < staging_folder._idle_seconds(tmp_path) < 200
