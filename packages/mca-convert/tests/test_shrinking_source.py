"""A source that becomes shorter while it is read."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUT = """
import os, sys
from mca_convert import reader
from mca_convert.cli import main

path, how, keep = sys.argv[1], sys.argv[2], int(sys.argv[3])
def cutting(function):
    def call(*words):
        os.truncate(path, keep)
        return function(*words)
    return call
if how == "mapped":
    reader.SourceFile._populate = cutting(reader.SourceFile._populate)
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
