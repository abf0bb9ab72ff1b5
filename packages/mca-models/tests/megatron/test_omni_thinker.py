"""A complete omni checkpoint is trained as its thinker, and saved as one."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import tiny_omni
import torch
import transformers
from safetensors.torch import load_file

from mca_models.megatron import AutoModel
from mca_models.megatron.distributed import parallel
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.parts.passthrough import without_passthrough


@pytest.fixture(autouse=True)
def no_process_groups() -> Iterator[None]:
    """Leave none to other tests of this process."""
    yield
    parallel.stop()


@pytest.mark.parametrize("kind", tiny_omni.WHOLE)
def test_transformers_puts_a_saved_thinker_into_the_complete_model(kind: str, tmp_path: Path) -> None:
    """Follow the page about omni models."""
    source = tiny_omni.save_whole(kind, tmp_path / "source")
    model = AutoModel.from_pretrained(source)
    with torch.no_grad():
        for _, tensor in model.local_params():
            tensor.add_(1)
    model.save_pretrained_as_hf(tmp_path / "trained")
    whole = transformers.AutoModelForMultimodalLM.from_pretrained(source)
    whole.thinker = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "trained")
    whole.save_pretrained(tmp_path / "complete")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "complete"))
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(after[name], x + 1 if name.startswith("thinker.") else x), name


@pytest.mark.parametrize("kind", tiny_omni.WHOLE)
def test_the_thinker_of_a_complete_checkpoint_is_built(kind: str, tmp_path: Path, caplog: Any) -> None:
    source = tiny_omni.save_whole(kind, tmp_path / "source")
    with caplog.at_level(logging.WARNING):
        model = AutoModel.from_pretrained(source)
    assert f"a checkpoint saved from this model is that of {kind}_thinker alone" in caplog.text
    model.save_pretrained_as_hf(tmp_path / "saved")
    before = load_file(source / "model.safetensors")
    after = load_file(next((tmp_path / "saved").glob("*.safetensors")))
    thinker = {name.removeprefix("thinker."): x for name, x in before.items() if name.startswith("thinker.")}
    assert after.keys() == thinker.keys()
    assert all(torch.equal(x, after[name]) for name, x in thinker.items())
    hf = tiny_hf.read_config(tmp_path / "saved")
    assert (hf["model_type"], hf["architectures"]) == (
        f"{kind}_thinker",
        [get_family(f"{kind}_thinker").architecture],
    )
    assert not {"talker_config", "thinker_config"} & hf.keys()
    again = config_from_hf(hf)
    whole = without_passthrough(config_from_hf(json.loads((source / "config.json").read_text())))
    assert again.replace_fields(extra={}, hf_config={}) == whole.replace_fields(extra={}, hf_config={})
