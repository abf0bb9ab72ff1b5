"""`faults.c` compiled, and the errors that it gives."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES)


def compiled(target: Path) -> Path:
    """The preloaded library."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, which is not here")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", target, HERE / "faults.c", "-ldl"], check=True
    )
    return target
