"""A source that becomes shorter while it is read."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUT = """
import os, sys
from mca_convert import collect, reader
from mca_convert.cli import main

path, how, keep = sys.argv[1], sys.argv[2], int(sys.argv[3])
def cutting(function):
    def call(*words):
        os.truncate(path, keep)
        return function(*words)
    return call
if how == "mapped":
    collect.copy_move = cutting(collect.copy_move)
elif how == "before it is mapped":
    reader.SourceFile.mapped = cutting(reader.SourceFile.mapped)
else:
    reader.SourceFile.read_into = cutting(reader.SourceFile.read_into)
sys.argv[1:] = sys.argv[4:]
sys.exit(main())
"""


@pytest.mark.parametrize("how", ["mapped", "before it is mapped", "read"])
@pytest.mark.parametrize("keep", [0, 16384])
def test_a_source_that_is_cut_off_is_named(how: str, keep: int, tiny, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "parent" / "out"
    shutil.copytree(tiny("llama"), source)
    weights = source / "model.safetensors"
    flags = ["--checkpoint_path", str(source), "--output_path", str(output), "--tensor_model_parallel_size=2"]
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(weights), how, str(keep), *flags], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and str(weights) in done.stderr and "changed" in done.stderr
    assert not output.parent.exists()


BOTH = """
import ctypes, itertools, mmap, os, sys, threading
from mca_convert import sigbus

size = 2 * mmap.PAGESIZE
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(handle, size)
read = mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
start = ctypes.addressof(ctypes.c_char.from_buffer(read))
os.ftruncate(handle, 0)
reported, arrived, order, file_at = [], threading.Barrier(2), itertools.count(), sigbus._file_at
given = threading.Event()

def one_after_the_other(address):
    if (turn := next(order)) < 2:
        arrived.wait(60)  # both threads have read where nothing is
        if turn == 1:
            given.wait(60)
    return file_at(address)

def tell(error):
    reported.append(str(error))
    given.set()

sigbus._file_at = one_after_the_other
with sigbus.catching_truncated_files(tell):
    threads = [threading.Thread(target=ctypes.string_at, args=(start, 1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ctypes.string_at(start + mmap.PAGESIZE, 1)
assert len(reported) == 2, reported
os._exit(0)
"""


def test_two_threads_may_read_one_page_that_is_gone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BOTH, str(tmp_path / "cut")], check=True)
