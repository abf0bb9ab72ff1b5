"""Import paths of shared test modules, and fixtures of most trainer tests."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_SHARED = ("mca-models/tests", "mca-models/tests/torch_checkpoint", "mca-train/tests")
pytest.register_assert_rewrite(
    *(path.stem for path in (_HERE / "support").glob("*.py") if path.stem not in sys.modules)
)
sys.path[:0] = [
    str(_HERE.parent),
    *(str(_HERE.parent / "packages" / tests) for tests in _SHARED),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip models that the installed transformers lacks or computes wrongly."""
    from tiny_versions import skip

    skip(items)


@pytest.fixture(scope="session")
def every_case(request: pytest.FixtureRequest) -> bool:
    """Return whether ``--cases all`` is given: cases then also train longer, or plant every fault."""
    every: bool = request.config.option.cases == "all"
    return every


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, every_case: bool) -> Path:
    """A random Qwen3, only to be read: of four layers for virtual stages with ``--cases all``, else of two."""
    from train_cases import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4 if every_case else 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with a model and data for runs of the command, and their output."""
    from cli_runs import fill

    return fill(tmp_path_factory.mktemp("run"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "mca-test", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
