"""Classification heads of models with images: scores are transformers', and files are written as read."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
import transformers

from harness import run_ranks
from layouts import arguments, world_size
from vision_reference import hidden_of, rows_of, vision_model

pytestmark = pytest.mark.ranks

ALLOWED = 1e-4
"""The tolerance of logits in fp32; scores are sums of the same hidden states, of a size of 1 here."""
CASES = {
    "gemma3": ("gemma3", "Gemma3ForSequenceClassification"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForSequenceClassification"),
    "qwen3_5-tokens": ("qwen3_5", "Qwen3_5ForTokenClassification"),
}
LAYOUTS = ("tp1", "tp2sp", "cp2pp2")


def saved(name: str, folder: Path) -> tuple[Path, torch.Tensor]:
    """Return the directory of a model with a head, and transformers' scores of rows with images."""
    case, architecture = CASES[name]
    config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(case)))
    config.num_labels = 3
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, architecture)(config).eval()
    model.model.load_state_dict(vision_model(case).model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder / name)
    input_ids, _, images = rows_of(case)
    with torch.no_grad():
        return folder / name, model.score(hidden_of(model.model, input_ids, images))


def compute(path: Path, case: str, layout: str) -> torch.Tensor:
    """Return the scores, and write the model below ``path``. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models: Any = AutoModel.from_pretrained(path, arguments(layout))
    input_ids, _, images = rows_of(case)
    scores: torch.Tensor = models.logits(input_ids, media=images)
    models.save_pretrained_as_hf(path / layout)
    return scores


@pytest.mark.cases(0, always=["tp2sp-gemma3", "cp2pp2-qwen3_5"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_with_images_and_files_are_those_of_transformers(
    layout: str, name: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path, wanted = saved(name, tmp_path)
    assert wanted.std() > 0.5
    for scores in run_ranks(world_size(layout), compute, path, CASES[name][0], layout):
        torch.testing.assert_close(scores, wanted, rtol=0, atol=ALLOWED)
    theirs, ours = (load_file(each / "model.safetensors") for each in (path, path / layout))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    written, read = (json.loads((each / "config.json").read_text()) for each in (path / layout, path))
    assert written == read
