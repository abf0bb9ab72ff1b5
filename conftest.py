"""Keeps the multi-process tests in one xdist worker: they share one import of Megatron, and two cores."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives every test marked `ranks` the same group."""
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
