"""A mixture of sources, rows or indexed tokens: the losses of each in the log, on any layout, resumed anywhere."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked_cli
from mca_train.data.indexed import write_indexed
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory, every_case):
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("mixture")
    tiny_checkpoint(folder / "model", vocab_size=264, num_hidden_layers=2 if every_case else 1)
    byte_tokenizer().save_pretrained(folder / "model")
    for name, word, count in (("easy", "aaaa", 5), ("hard", "q7!z", 11)):
        rows = [{"prompt": word * (n % 3 + 1), "completion": word * (n % 4 + 2)} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw = np.random.default_rng(3)
    write_indexed(folder / "corpus", [draw.integers(0, 256, size).tolist() for size in (70, 33, 41)], 264)
    texts = [{"text": f"{n} is not {n + 1}. "} for n in range(5)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


ANSWERS = {"easy.jsonl": 1, "hard.jsonl": 3}
TEXTS = {"corpus": 3, "texts.jsonl": 1}
USED = {
    "sft": "easy 4 of 5 samples (0.80 epochs), hard 12 of 11 samples (1.09 epochs)",
    "pretrain": "corpus 10 of 9 samples (1.11 epochs), texts 3 of 4 samples (0.75 epochs)",
}


def _trained(
    folder: Path, name: str, *words: str, kind: str = "sft", **values: Any
) -> list[dict[str, float]]:
    weights = ANSWERS if kind == "sft" else TEXTS
    run = {
        "model_name_or_path": str(folder / "model"),
        "datasets": [{"path": str(folder / path), "weight": weight} for path, weight in weights.items()],
        "output_dir": str(folder / name),
        "seq_length": 64,
        "max_steps": 5,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        **values,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(run))
    done = forked_cli.launched(
        [sys.executable, "-m", "mca_train", kind, str(folder / f"{name}.yaml"), *words]
    )
    assert done.returncode == 0, done.stderr
    assert USED[kind] in done.stderr
    lines = (folder / name / "train_log.jsonl").read_text().splitlines()
    return [log for line in lines if "loss" in (log := json.loads(line))]


def _assert_same_losses(steady: list[dict[str, float]], cut: list[dict[str, float]]) -> None:
    assert [log["step"] for log in cut] == [1, 2, 3, 4, 5]
    for expected, found in zip(steady, cut, strict=True):
        names = {"loss"} | {key for key in expected if key.startswith("loss/")}
        assert names - found.keys() == set()
        assert [found[name] for name in sorted(names)] == pytest.approx(
            [expected[name] for name in sorted(names)], rel=1e-5
        )


@pytest.mark.cases(0, always=["True"])
@pytest.mark.parametrize("packed", [True, False])
def test_each_source_has_its_loss_on_every_layout_and_after_resuming(folder, packed):
    steady = _trained(folder, f"steady{packed}", sequence_packing=packed)
    seen = {key for log in steady for key in log if key.startswith("loss/")}
    assert seen == {"loss/easy", "loss/hard"}
    for log in steady:
        losses = [log[key] for key in seen & log.keys()]
        assert min(losses) - 1e-6 <= log["loss"] <= max(losses) + 1e-6
    assert any(len(seen & log.keys()) == 2 for log in steady)
    two = ("--nproc_per_node", "2", "--gradient_accumulation_steps", "2", "--max_steps", "2")
    _trained(folder, f"cut{packed}", *two, sequence_packing=packed)
    cut = _trained(folder, f"cut{packed}", "--resume_from_checkpoint", "auto", sequence_packing=packed)
    _assert_same_losses(steady, cut)


TENSOR = ("--nproc_per_node", "2", "--tensor_model_parallel_size", "2")
PIPELINE = ("--nproc_per_node", "2", "--pipeline_model_parallel_size", "2")


@pytest.mark.cases(0, always=["pretrain-tp2-one"])
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("pretrain", TENSOR, ()), ("sft", PIPELINE, TENSOR), ("pretrain", PIPELINE, TENSOR)],
    ids=["pretrain-tp2-one", "sft-pp2-tp2", "pretrain-pp2-tp2"],
)
def test_indexed_tokens_and_rows_are_resumed_on_another_layout(folder, kind, first, second):
    length = 16 if kind == "pretrain" else 64
    name = f"{kind}{len(second)}"
    steady = _trained(folder, f"steady{name}", kind=kind, seq_length=length)
    assert {key for log in steady for key in log if key.startswith("loss/")} == {
        f"loss/{Path(path).stem}" for path in (ANSWERS if kind == "sft" else TEXTS)
    }
    _trained(folder, name, *first, "--max_steps", "2", kind=kind, seq_length=length)
    resumed = (*second, "--resume_from_checkpoint", "auto")
    _assert_same_losses(steady, _trained(folder, name, *resumed, kind=kind, seq_length=length))
