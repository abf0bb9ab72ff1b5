"""The names that the package exports, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_hf import save

from mca_config import McaError
from mca_models import AutoConfig, config_from_hf, open_checkpoint


def test_a_configuration_is_read_without_weights(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    config = AutoConfig.from_pretrained(folder)
    assert config == config_from_hf(json.loads((folder / "config.json").read_text()))
    assert AutoConfig.from_pretrained(str(folder)).model_type == "qwen3"
    with pytest.raises(McaError, match=r"config\.json"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_checkpoint_is_opened_by_the_name_of_its_directory(tmp_path: Path) -> None:
    source = open_checkpoint(str(save("llama", tmp_path / "hf")))
    assert source.config.model_type == "llama"
    assert {tensor.name for tensor in source.tensors()} >= {"model.norm.weight", "lm_head.weight"}


def test_these_names_need_no_torch() -> None:
    code = "import sys, mca_models; assert 'numpy' not in sys.modules; "
    code += "mca_models.AutoConfig, mca_models.config_from_hf, mca_models.open_checkpoint; "
    code += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
