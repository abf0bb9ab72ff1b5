"""Makes ``harness`` and its neighbours importable; the model that most of the trainer's tests train."""

import sys
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of four layers, only to be read."""
    from train_cases import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("model"))
