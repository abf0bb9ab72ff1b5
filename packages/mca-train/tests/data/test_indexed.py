"""Megatron's indexed datasets: what is written is what is read, by us and by Megatron."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError, UsageError
from mca_train.cli import main
from mca_train.config.arguments import DataArguments
from mca_train.data import indexed
from mca_train.data.indexed import indexed_blocks, write_indexed
from mca_train.run import data_commands
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_mixture, load_tokenized


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_texts_that_are_tokenized_train_on_the_same_blocks(run, tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(9)))
    path = run(train_file=str(file), seq_length=16, output_dir=...)
    assert main(["tokenize", path, "--output_prefix", str(tmp_path / "new" / "out" / "corpus")]) == 0
    assert "corpus.idx: 8 documents, 188 tokens" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "new" / "out").iterdir()) == ["corpus.bin", "corpus.idx"]
    tokenizer = byte_tokenizer()
    arguments = DataArguments(
        model_name_or_path="m", seq_length=16, datasets=[{"path": str(tmp_path / "new" / "out" / "corpus")}]
    )
    mixture = load_mixture(TASKS["pretrain"], tokenizer, arguments, seed=0)
    plain = load_tokenized(TASKS["pretrain"], [str(file)], tokenizer, arguments)
    assert len(mixture) == len(plain)
    for place in range(len(plain)):
        assert mixture[place]["input_ids"].tolist() == plain[place]["input_ids"].tolist()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs = IndexedDataset(str(tmp_path / "new" / "out" / "corpus"))
    assert len(theirs) == 8
    assert theirs.get(0).tolist() == [*tokenizer("word ")["input_ids"], tokenizer.eos_token_id]
    assert main(["tokenize", path, "--output_prefix", str(tmp_path / "new" / "out" / "corpus")]) == 2
    assert main(["tokenize", path]) == 2
    assert main(["tokenize", path, "--output_prefix", f"{path}/below/corpus"]) == 1
    errors = capsys.readouterr().err
    assert "corpus: cannot be written (Not a directory); name another --output_prefix" in errors
    assert "corpus.bin exists; name another prefix" in errors
    assert "mca-train tokenize needs --output_prefix" in errors


def test_what_is_tokenized_for_a_model_that_sees_has_no_images_and_no_placeholders(
    run, tmp_path, monkeypatch, capsys
):
    file, prefix = tmp_path / "texts.jsonl", str(tmp_path / "corpus")
    path = run(train_file=str(file), seq_length=16, output_dir=...)
    mark = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    seeing = SimpleNamespace(vision_fields={"image_token_id": mark})
    monkeypatch.setattr(data_commands, "model_config", lambda model: seeing)
    file.write_text(json.dumps({"text": "a", "image": "x.png"}) + "\n")
    assert main(["tokenize", path, "--output_prefix", prefix]) != 0
    assert "train_file, row 0" in (reported := capsys.readouterr().err)
    assert "has image, which only mca-train pretrain with a vision-language model reads" in reported
    file.write_text(json.dumps({"text": "a<|im_end|>", "image": None}) + "\n")
    assert main(["tokenize", path, "--output_prefix", prefix]) == 0
    (block,) = indexed_blocks(Path(prefix), 64, 300)
    assert mark not in block["input_ids"].tolist()


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_small_and_large_vocabularies_are_kept_exactly(vocab, tmp_path):
    documents = [[vocab - 1, 0, 5], [7] * 6]
    assert write_indexed(tmp_path / "a", documents, vocab) == (2, 9)
    blocks = indexed_blocks(tmp_path / "a", 4, vocab)
    assert blocks.lengths.tolist() == [4, 4]  # one token more has no target
    assert np.concatenate([blocks[place]["input_ids"] for place in range(2)]).tolist() == [
        vocab - 1,
        0,
        5,
        *[7] * 5,
    ]


def test_the_largest_token_is_looked_for_once_and_again_when_the_file_changes(tmp_path, monkeypatch, caplog):
    read = []
    looked_for = indexed._scan
    monkeypatch.setattr(indexed, "_scan", lambda *given: read.append(1) or looked_for(*given))
    monkeypatch.setattr(indexed, "_SLOW_BYTES", 2)
    monkeypatch.setattr(indexed, "_TOKENS_PER_READ", 2)
    caplog.set_level("INFO")
    write_indexed(tmp_path / "a", [[1, 9, 3], [5, 2]], 300)

    def times(vocab=10, cache=None):
        read.clear()
        indexed_blocks(tmp_path / "a", 4, vocab, cache)
        return len(read)

    kept = tmp_path / "a.largest.json"
    assert [times(), times()] == [1, 0]
    assert (
        f"a.bin: reading all 0.0 GiB to find the largest token id, once; it is kept in {kept}" in caplog.text
    )
    with pytest.raises(McaError, match="holds token 9, the tokenizer has 9"):
        times(vocab=9)
    kept.write_text("{")
    assert [times(), times()] == [1, 0]
    cache = str(tmp_path / "cache of tokens")
    assert [times(cache=cache), times(cache=cache)] == [1, 0]
    data = np.fromfile(tmp_path / "a.bin", np.uint16)
    data[0] = 11
    before = (tmp_path / "a.bin").stat()
    data.tofile(tmp_path / "a.bin")
    os.utime(tmp_path / "a.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    for folder in (None, cache):
        with pytest.raises(McaError, match="holds token 11, the tokenizer has 10"):
            times(cache=folder)
    kept.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    caplog.clear()
    assert [times(vocab=12), times(vocab=12)] == [1, 1]
    assert "at each start, as its folder cannot be written; set tokenized_cache" in caplog.text
    assert not kept.exists()


def test_files_that_do_not_belong_together_are_named(tmp_path):
    write_indexed(tmp_path / "a", [[1, 2, 3]], 300)
    with pytest.raises(
        McaError, match="holds token 3, the tokenizer has 3; it was made with another tokenizer"
    ):
        indexed_blocks(tmp_path / "a", 4, 3)
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(data[:-2])
    with pytest.raises(McaError, match=r"a\.bin: has 2 tokens, .*a\.idx counts 3; one of them is damaged"):
        indexed_blocks(tmp_path / "a", 4, 300)
    (tmp_path / "a.idx").write_bytes(b"no index")
    with pytest.raises(McaError, match=r"a\.idx: cannot be read as an indexed dataset"):
        indexed_blocks(tmp_path / "a", 4, 300)
    Path(tmp_path / "a.idx").unlink()
    arguments = DataArguments(model_name_or_path="m", datasets=[{"path": str(tmp_path / "a.bin")}])
    with pytest.raises(UsageError, match=r"a\.bin and .*a\.idx must both exist"):
        load_mixture(TASKS["pretrain"], byte_tokenizer(), arguments, seed=0)


def test_answers_are_not_learnt_from_tokens(tmp_path):
    write_indexed(tmp_path / "a", [[1, 2, 3]], 300)
    arguments = DataArguments(model_name_or_path="m", datasets=[{"path": str(tmp_path / "a")}])
    with pytest.raises(
        UsageError, match="is an indexed dataset, which only mca-train pretrain reads, not sft"
    ):
        load_mixture(TASKS["sft"], byte_tokenizer(), arguments, seed=0)


@pytest.mark.parametrize("name", ["tokens", "tokens.v2"])
def test_a_prefix_may_have_a_dot_and_either_file_names_it(name, tmp_path):
    prefix = tmp_path / name
    for end in (".bin", ".idx"):
        Path(f"{prefix}{end}").touch()
    assert {indexed.find_prefix(f"{prefix}{end}") for end in ("", ".bin", ".idx")} == {prefix}
    assert indexed.find_prefix(str(tmp_path / "others.v2")) is None


def test_the_folder_of_the_largest_token_is_made_once(tmp_path):
    for _ in range(2):
        found = indexed._cache_file(tmp_path / "a.bin", str(tmp_path / "new" / "cache"))
        assert found.parent == tmp_path / "new" / "cache" and found.parent.is_dir()
    assert indexed._cache_file(tmp_path / "a.bin", None) == tmp_path / "a.largest.json"
