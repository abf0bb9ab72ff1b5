"""Exit codes depend on the output, not on the messages."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from files import assert_same_tensors


def close_all() -> None:
    os.closerange(0, 3)


def closed() -> None:
    os.close(2)


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def unread() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


# closed is a part of close_all, and unread raises an OSError as full does
@pytest.mark.cases(0, always=["close_all", "full"])
@pytest.mark.parametrize("harm", [close_all, closed, full, unread])
def test_standard_error(harm: Callable[[], None], tiny, tmp_path: Path) -> None:
    for output, code in ((tmp_path / "out", 0), (tmp_path / "out", 1), (tmp_path / "x" / "out", 2)):
        unknown = ["--unknown"] if code == 2 else []
        command = [
            "--checkpoint_path",
            str(tiny("llama")),
            "--output_path",
            str(output),
            "--to",
            "hf",
            *unknown,
        ]
        done = subprocess.run([sys.executable, "-m", "mca_convert", *command], preexec_fn=harm)
        assert done.returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same_tensors(tiny("llama"), tmp_path / "out")
