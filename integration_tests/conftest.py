"""Makes ``harness`` and its neighbours importable and keeps multi-process tests in one xdist worker."""

import sys
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
