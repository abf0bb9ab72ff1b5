"""Keeps the multi-process tests of a module in one xdist worker: they share its process groups and models.

Skips those that need a GPU where there is none.
"""

from functools import cache

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests marked `ranks` of a module one group; marks those marked `gpu` as skipped without a GPU."""
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
