"""``mca-train sft`` with a tokenizer that has more tokens than the model: rows are added, alike on every layout."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import launched
from harness import run_ranks
from mca_train.config.arguments import DataArguments
from mca_train.run.early_rules import vocabulary_problems
from train_cases import tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

OLD, TOKENS = 256, 263
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fewer rows than its tokenizer has tokens."""
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    tiny_checkpoint(folder / "model", vocab_size=OLD, num_hidden_layers=2)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>", "<think>"])
    assert len(tokenizer) == TOKENS
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"<tool>{n}", "completion": "<think>" + "é" * n} for n in range(1, 9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def grow(model: Path, target: Path) -> None:
    """The same model on one rank, not trained. Runs on every rank."""
    from mca_models import AutoModel

    AutoModel.from_pretrained(model, vocab_size=TOKENS, seed=11).save_pretrained_as_hf(target)


def test_new_tokens_are_added_and_trained(folder: Path) -> None:
    changes = {"seed": 11, "max_steps": 2, "weight_decay": 0.0, "tensor_model_parallel_size": 2}
    done = launched(folder, "sft", "run", save_hf_model=True, **changes)
    assert done.returncode == 0, done.stderr
    run_ranks(1, grow, folder / "model", folder / "grown")
    for path in (folder / "run" / "hf", folder / "grown"):
        assert json.loads((path / "config.json").read_text())["vocab_size"] == TOKENS
    before, after = (load_file(folder / p / "model.safetensors")[EMBEDDING] for p in ("grown", "run/hf"))
    original = load_file(folder / "model" / "model.safetensors")[EMBEDDING]
    assert len(before) == len(after) == TOKENS
    assert torch.equal(before[:OLD], original.to(before.dtype))
    changed = (after != before).any(1)
    # in the data are <tool> and <think>; a row that no gradient reaches is as it was drawn, whatever the layout
    assert changed[[TOKENS - 3, TOKENS - 1]].tolist() == [True, True]
    assert not changed[TOKENS - 2]


def test_an_adapter_has_no_place_for_new_tokens(folder: Path) -> None:
    data = DataArguments(model_name_or_path=str(folder / "model"))
    settings: Any = SimpleNamespace(data=data, lora=SimpleNamespace(is_enabled=True))
    (reported,) = vocabulary_problems(settings, OLD)
    assert "has 263 tokens, the model's vocabulary 256" in reported
    assert "vocab_size=263" in reported
    assert not [*vocabulary_problems(settings, TOKENS)]
