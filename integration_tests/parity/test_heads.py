"""Models with a head for scores compute what transformers' classes do, on every layout, and are written as read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from layouts import arguments, world_size
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

IDS = torch.arange(2 * 24).reshape(2, 24) * 7 % 130
CASES = {"score": ("Qwen3", "SequenceClassification", 1), "tokens": ("Llama", "TokenClassification", 3)}
LAYOUTS = ("tp1", "tp2sp", "tp2pp2", "cp2pp2", "pp2vpp2")
VALUES = ("tp2sp", "pp2vpp2")
"""Layouts of which a new head gives a value for each token; of the others, three scores for each sequence."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, every_case: bool) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("heads")
    layers = 4 if every_case else 2  # virtual stages need four
    for name, (family, task, labels) in CASES.items():
        config = getattr(transformers, f"{family}Config")
        model = getattr(transformers, f"{family}For{task}")
        tiny_checkpoint(
            folder / name, config, model, num_hidden_layers=layers, num_labels=labels, pad_token_id=0
        )
    tiny_checkpoint(folder / "plain", num_hidden_layers=layers, tie_word_embeddings=True)
    return folder


def scores(checkpoint: Path, task: str) -> torch.Tensor:
    """Return the scores of every token, by transformers."""
    import transformers

    model = (
        getattr(transformers, f"AutoModelFor{task}").from_pretrained(checkpoint, dtype=torch.float32).eval()
    )
    with torch.no_grad():
        found: torch.Tensor = model.score(model.model(IDS).last_hidden_state)
    return found


def by_megatron(folder: Path, layout: str) -> dict[str, Any]:
    from mca_models import AutoModel
    from mca_models.templates.classification_head import Head

    found = {}
    for name in CASES:
        model = AutoModel.from_pretrained(folder / name, arguments(layout))
        found[name] = model.logits(IDS)
        model.save_pretrained_as_hf(folder / f"{name}-{layout}")
        model.save_pretrained(folder / f"{name}-{layout}-mca")
        again = AutoModel.from_pretrained(folder / f"{name}-{layout}-mca", arguments(layout))
        assert torch.equal(again.logits(IDS), found[name])
    head = Head(kind="sequence_classification", labels=("no", "maybe", "yes"))
    if layout in VALUES:
        head = Head(kind="token_classification", labels=("value",))
    new = AutoModel.from_pretrained(folder / "plain", arguments(layout), head=head)
    found["uses decoupled_lr"] = [
        name
        for chunk in new.chunks
        for name, parameter in chunk.named_parameters()
        if getattr(parameter, "is_embedding_or_output_parameter", False)
    ]
    found["new"] = new.logits(IDS)
    if (end := getattr(new.chunks[-1], "output_layer", None)) is not None:
        hidden = torch.ones(4, 2, end.weight.shape[1], requires_grad=True)
        end(hidden)[0].sum().backward()
        assert torch.allclose(hidden.grad, end.weight.sum(0).expand_as(hidden)), "of each row once"
    new.save_pretrained_as_hf(folder / f"new-{layout}")
    return found


@pytest.mark.cases(0, always=["tp2sp", "cp2pp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_files_are_those_of_transformers(folder: Path, layout: str) -> None:
    from safetensors.torch import load_file

    found = run_ranks(world_size(layout), by_megatron, folder, layout)
    for name, (_, task, labels) in CASES.items():
        right = scores(folder / name, task)
        assert right.shape[-1] == labels
        for rank in found:
            torch.testing.assert_close(rank[name], right, rtol=0, atol=1e-5)
        ours, theirs = (load_file(folder / some / "model.safetensors") for some in (f"{name}-{layout}", name))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        torch.testing.assert_close(scores(folder / f"{name}-{layout}", task), right)
    task = "TokenClassification" if layout in VALUES else "SequenceClassification"
    written = scores(folder / f"new-{layout}", task)
    assert written.shape[-1] == (1 if layout in VALUES else 3)
    torch.testing.assert_close(found[0]["new"], written, rtol=0, atol=1e-5)
    named = {name for rank in found for name in rank["uses decoupled_lr"]}  # decoupled_lr
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= named
    assert 0.1 < float(written.std()) < 10  # drawn, the same on every layout


@pytest.mark.parametrize("name", list(CASES))
def test_the_converter_takes_heads_both_ways(folder: Path, name: str, tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file

    from mca_convert.cli import main

    paths = [str(folder / name), str(tmp_path / "mca"), str(tmp_path / "hf")]
    sizes = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2"]
    assert main(["--checkpoint_path", paths[0], "--output_path", paths[1], *sizes]) == 0
    assert main(["--checkpoint_path", paths[1], "--output_path", paths[2]]) == 0
    assert main(["verify", paths[0], paths[2]]) == 0
    ours, theirs = (load_file(Path(path) / "model.safetensors") for path in (paths[2], paths[0]))
    assert ours.keys() == theirs.keys()
    assert "score.weight" in ours
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    configs = [json.loads((Path(path) / "config.json").read_text()) for path in (paths[0], paths[2])]
    assert configs[0] | {"id2label": None, "label2id": None} == configs[1] | {
        "id2label": None,
        "label2id": None,
    }
