"""Standard streams that are closed when a command starts."""

import os
from pathlib import Path

import pytest

from mca_config.streams import safe_streams


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_closed_stream(closed: tuple[int, ...], tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            for number in closed:
                os.close(number)
            with safe_streams(to_the_end=True, output_too=True):
                code = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert 2 < os.waitstatus_to_exitcode(status) < 99
