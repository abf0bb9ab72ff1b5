"""``mca-train sft`` with a tokenizer that has more tokens than the model: rows are added, alike on every layout."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from test_train_kinds import LORA, launched
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

OLD = 256
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fewer rows than its tokenizer has tokens."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "packages" / "mca-train" / "tests"))
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    tiny_checkpoint(folder / "model", vocab_size=OLD, num_hidden_layers=2)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>", "<think>"])
    assert len(tokenizer) == 263
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"<tool>{n}", "completion": "<think>" + "é" * n} for n in range(1, 9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(folder: Path, name: str, **changes: Any) -> Path:
    done = launched(folder, "sft", name, save_hf_model=True, seed=11, max_steps=2, **changes)
    assert done.returncode == 0, done.stderr
    return folder / name


def test_new_tokens_are_trained_alike_on_every_layout(folder: Path) -> None:
    plain = trained(folder, "still", learning_rate="0.0")
    cut = trained(folder, "cut", tensor_model_parallel_size=2, learning_rate="0.0")
    moved = trained(folder, "moved", tensor_model_parallel_size=2)
    for output in (plain, cut, moved):
        assert json.loads((output / "hf" / "config.json").read_text())["vocab_size"] == 263
    first, second, third = (load_file(output / "hf" / "model.safetensors") for output in (plain, cut, moved))
    original = load_file(folder / "model" / "model.safetensors")
    assert first[EMBEDDING].shape[0] == 263
    assert torch.equal(first[EMBEDDING][:OLD], original[EMBEDDING].to(first[EMBEDDING].dtype))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    learnt = (third[EMBEDDING] - first[EMBEDDING]).abs().amax(1)
    assert float(learnt[OLD:].max()) > 0, "the new tokens' rows are trained"


def test_an_adapter_has_no_place_for_new_tokens(folder: Path) -> None:
    done = launched(folder, "sft", "adapter", **LORA)
    assert done.returncode == 1
    assert "the tokenizer has 263 tokens, the model's vocabulary 256" in done.stderr
    assert "vocab_size=263" in done.stderr
