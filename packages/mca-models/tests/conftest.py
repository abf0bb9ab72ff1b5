"""Makes the helpers beside the tests importable under ``--import-mode=importlib``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the models that this transformers has not, or not right."""
    from tiny_versions import skip

    skip(items)
