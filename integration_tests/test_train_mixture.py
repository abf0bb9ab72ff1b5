"""A mixture of sources through ``mca-train``: the losses of each in the log, on any layout, resumed anywhere."""

import json
import os
import sys
from pathlib import Path

import pytest

import forked_cli
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("mixture")
    tiny_checkpoint(folder / "model", vocab_size=264, num_hidden_layers=2)
    byte_tokenizer().save_pretrained(folder / "model")
    for name, word, count in (("easy", "aaaa", 5), ("hard", "q7!z", 11)):
        rows = [{"prompt": word * (n % 3 + 1), "completion": word * (n % 4 + 2)} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _trained(folder: Path, name: str, *words: str, packed: bool = False) -> list[dict[str, float]]:
    sources = [
        {"path": str(folder / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("easy", 1), ("hard", 3))
    ]
    run = {
        "model_name_or_path": str(folder / "model"),
        "datasets": sources,
        "output_dir": str(folder / name),
        "seq_length": 64,
        "sequence_packing": packed,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(run))
    done = forked_cli.launched(
        [sys.executable, "-m", "mca_train", "sft", str(folder / f"{name}.yaml"), *words]
    )
    assert done.returncode == 0, done.stderr
    assert "easy 4 of 5 samples (0.80 epochs), hard 12 of 11 samples (1.09 epochs)" in done.stderr
    lines = (folder / name / "train_log.jsonl").read_text().splitlines()
    return [log for line in lines if "loss" in (log := json.loads(line))]


@pytest.mark.parametrize("packed", [True, False] if os.environ.get("MCA_EVERY_LAYOUT") else [True])
def test_sources_have_losses_of_their_own_on_every_layout_and_after_resuming(folder, packed):
    steady = _trained(folder, f"steady{packed}", packed=packed)
    seen = {key for log in steady for key in log if key.startswith("loss/")}
    assert seen == {"loss/easy", "loss/hard"}
    for log in steady:
        losses = [log[key] for key in seen & log.keys()]
        assert min(losses) - 1e-6 <= log["loss"] <= max(losses) + 1e-6
    assert any(len(seen & log.keys()) == 2 for log in steady)
    two = ("--local_ranks", "2", "--gradient_accumulation_steps", "2", "--max_steps", "3")
    _trained(folder, f"cut{packed}", *two, packed=packed)
    cut = _trained(folder, f"cut{packed}", "--resume_from_checkpoint", "auto", packed=packed)
    assert [log["step"] for log in cut] == [1, 2, 3, 4, 5, 6]
    for expected, found in zip(steady, cut, strict=True):
        names = {"loss"} | {key for key in expected if key.startswith("loss/")}
        assert names - found.keys() == set()
        assert [found[name] for name in sorted(names)] == pytest.approx(
            [expected[name] for name in sorted(names)], rel=1e-5
        )
