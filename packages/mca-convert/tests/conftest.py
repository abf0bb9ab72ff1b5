"""Tiny checkpoints, made once for each case and dtype, and the command in this process."""

import shutil
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
            if dtype == "float32":
                made[key] = tiny_hf.save(case, directory)
            else:
                made[key] = in_dtype(get(case), directory, dtype)
        return made[key]

    return get


def in_dtype(source: Path, directory: Path, dtype: str) -> Path:
    """A copy of ``source`` in another dtype, as transformers saves it."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    kept = [name for name in tensors if name.endswith("e_score_correction_bias")]
    cast = {name: x if name in kept else x.to(getattr(torch, dtype)) for name, x in tensors.items()}
    save_file(cast, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    (directory / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    return directory


@pytest.fixture
def source(tiny, tmp_path: Path) -> Path:
    copy = tmp_path / "source"
    shutil.copytree(tiny("llama"), copy)
    return copy


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
