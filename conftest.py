"""Keeps the multi-process tests of a module in one xdist worker: they share its process groups and models.

Everything is computed on the CPU, also where there is a GPU: a process that has asked CUDA anything cannot fork ranks
that use it. ``MCA_DEVICE=cuda pytest -m gpu`` runs the tests of a GPU, and those alone.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("MCA_DEVICE", "cpu")  # before anything asks; what tests start inherits it
if os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
):  # torch, Megatron and transformers anew: 6 s in every process
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False

import pytest

_ON_GPU = os.environ["MCA_DEVICE"] == "cuda"
_OTHER = {
    "ranks": (_ON_GPU, "forked ranks compute on the CPU; unset MCA_DEVICE"),
    "gpu": (not _ON_GPU, "needs a CUDA device: MCA_DEVICE=cuda pytest -m gpu"),
}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests marked `ranks` of a module one group; skips what the chosen device is not for."""
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        for mark, (skipped, reason) in _OTHER.items():
            if skipped and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
