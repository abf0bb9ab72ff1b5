"""``kill -9`` at random moments never leaves a directory that a reader takes for complete."""

import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from files import assert_same_tensors, tree

from mca_convert.cli import main

KILLS = int(os.environ.get("MCA_TEST_KILLS", "8"))  # 50 for the whole proof


def run_and_kill(arguments: list[str], number: int, seconds: float) -> tuple[int, int]:
    """Convert in a fork in which the alarm rings some seconds after the n-th touch of a file.

    The fork ends there as by kill -9: Python does not hear of it. Return its exit code and, if it has ended by itself,
    how many touches there were.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, b"%d" % _count_touches(arguments, number, seconds))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        touches = int(pipe.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), touches


def _count_touches(arguments: list[str], number: int, seconds: float) -> int:
    count = itertools.count(1)

    def hear(event: str, args: object) -> None:
        if event.startswith(("open", "os.", "mmap.")) and next(count) == number:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.addaudithook(hear)
    assert main(arguments) == 0
    return next(count) - 1


@pytest.mark.timeout(600)
def test_killed_at_random_moments(tiny, convert, tmp_path: Path) -> None:
    source, generator = tiny("qwen3_moe", "bfloat16"), random.Random(0)
    expected = tree(convert(source, "expected", tp=2, pp=2, ep=2))
    mca, hf = tmp_path / "k" / "mca", tmp_path / "k" / "hf"
    layout = [
        "--tensor_model_parallel_size=2",
        "--pipeline_model_parallel_size=2",
        "--expert_model_parallel_size=2",
    ]
    runs = {
        mca: ["--checkpoint_path", str(source), "--output_path", str(mca), *layout],
        hf: ["--checkpoint_path", str(tmp_path / "expected"), "--output_path", str(hf)],
    }
    whole = {target: run_and_kill(runs[target], 0, 0)[1] for target in runs}
    shutil.rmtree(tmp_path / "k")
    outcomes = {"killed": 0, "done": 0}
    for number in range(KILLS):
        target = (mca, hf)[number % 2]
        code, _ = run_and_kill(
            runs[target], generator.randint(1, int(1.2 * whole[target])), generator.uniform(1e-6, 0.003)
        )
        assert code in (0, -signal.SIGALRM)
        if target.exists():
            outcomes["done"] += 1
            assert tree(mca) == expected if target == mca else True
            if target == hf:
                assert_same_tensors(source, hf)
            shutil.rmtree(target)
        else:
            outcomes["killed"] += 1
            for leftover in target.parent.glob("*"):
                for directory in (leftover, leftover / "new"):
                    assert_refused_or_right(directory, source)
    assert outcomes["killed"] > KILLS // 5
    for target, arguments in runs.items():  # no clean-up by hand, and none left over
        assert main(arguments) == 0
        assert target.is_dir()
    assert sorted(path.name for path in mca.parent.iterdir()) == ["hf", "mca"]


def assert_refused_or_right(leftover: Path, source: Path) -> None:
    """Reads a leftover as if somebody had mistaken it for a checkpoint.

    Everything may have been written, with only the renaming to come: then it must hold the model.
    """
    again = source.parent / f"again-{leftover.name}"
    try:
        if main(["--checkpoint_path", str(leftover), "--output_path", str(again), "--to", "hf"]) == 0:
            assert_same_tensors(source, again)
    finally:
        shutil.rmtree(again, ignore_errors=True)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of ``nbytes`` in ``folder``."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    options = f"size={nbytes}"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_nothing_is_left(source: Path, disk: Path, capsys) -> str:
    """Return the messages, with the output's own name and not that of the temporary folder."""
    capsys.readouterr()
    assert main(["--checkpoint_path", str(source), "--output_path", str(disk / "out")]) == 1
    assert not any(disk.iterdir())
    error: str = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "No space left on device" in error
    assert error.startswith(f"error: {disk}/out") and ".partial-" not in error
    return error


def assert_bytes_are_told(error: str, disk: Path) -> None:
    words = r"at least ([\d,]+) bytes are needed, ([\d,]+) bytes are free; nothing half-written is left; make room"
    found = re.search(words, error)
    assert found is not None, error
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert needed > free == shutil.disk_usage(disk).free


def test_a_full_disk_is_found_before_any_work(tiny, tmp_path: Path, capsys) -> None:
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        assert_bytes_are_told(assert_nothing_is_left(tiny("llama"), disk, capsys), disk)


@pytest.mark.parametrize("target", ["mca", "hf"])
def test_a_disk_that_fills_halfway(target: str, tiny, convert, tmp_path: Path, capsys, monkeypatch) -> None:
    """Not every file system keeps what was reserved, and others write meanwhile."""
    source = tiny("llama") if target == "mca" else convert(tiny("llama"), "mca", tp=2)
    with small_disk(tmp_path / "small", 96 << 10) as disk:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", lambda fd, offset, length: os.ftruncate(fd, length))
            writes = []
            write = os.pwrite
            patch.setattr(os, "pwrite", lambda fd, data, at: writes.append(write(fd, data, at)) or writes[-1])
            assert_bytes_are_told(assert_nothing_is_left(source, disk, capsys), disk)
        assert sum(writes) > 64 << 10  # it had begun


def test_a_disk_without_room_for_the_small_files(tiny, convert, tmp_path: Path, capsys) -> None:
    mca = convert(tiny("llama"), "mca")
    (weights,) = mca.rglob("*.safetensors")
    pages = -(-weights.stat().st_size // 4096)
    with small_disk(tmp_path / "small", 4096 * pages) as disk:
        assert_nothing_is_left(tiny("llama"), disk, capsys)


def test_a_disk_that_is_found_full_by_the_sync(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("mca_models.storage.writer.os.fsync", full)
    assert_nothing_is_left(tiny("llama"), tmp_path / "disk", capsys)
