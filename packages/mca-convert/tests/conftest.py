"""Tiny checkpoints, made once for each case and dtype, and the command in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "mca-models" / "tests"))

from files import layout_flags

from mca_convert.cli import main

Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    import tiny_hf

    made: dict[tuple[str, str], Path] = {}

    def get(case: str, dtype: str = "float32") -> Path:
        key = (case, dtype)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"{case}-{dtype}") / "hf"
            made[key] = tiny_hf.save(case, directory, dtype)
        return made[key]

    return get


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Converts ``source`` to ``tmp_path / name``; fails the test unless it exits 0."""

    def run(source: Path, name: str, *flags: str, **layout: int | str) -> Path:
        target = tmp_path / name
        code = main(
            ["--checkpoint_path", str(source), "--output_path", str(target), *flags, *layout_flags(layout)]
        )
        assert code == 0
        return target

    return run
