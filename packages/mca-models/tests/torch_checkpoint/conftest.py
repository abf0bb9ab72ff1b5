"""Checkpoints for the tests of this folder, whose helpers it makes importable under ``--import-mode=importlib``."""

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
from safetensors.torch import load_file

from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf, get_family

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Any:
    made: dict[str, tuple[McaModelConfig, dict[str, torch.Tensor]]] = {}

    def make(case: str) -> tuple[McaModelConfig, dict[str, torch.Tensor]]:
        if case not in made:
            directory = tiny_hf.save(case, tmp_path_factory.mktemp(case), "bfloat16")
            hf = load_file(directory / "model.safetensors")
            config = config_from_hf(tiny_hf.read_config(directory))
            made[case] = get_family(config.model_type).with_checkpoint_names(config, hf), hf
        return made[case]

    return make
