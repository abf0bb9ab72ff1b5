"""``mca-train sft`` and ``dpo`` with adapters, from the shell to a PEFT directory; the worked example."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from cli_runs import launched
from harness import run_ranks
from train_cases import quietly, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

_ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "down_proj"], "use_rslora": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("kinds")
    tiny_checkpoint(folder / "model", vocab_size=264, num_hidden_layers=2)
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"prompt": f"{n}+1=", "completion": "x" * n, "chosen": str(n + 1), "rejected": "no"}
        for n in range(1, 9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def logs(output: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_sft_trains_an_adapter_packed_and_dpo_continues_it(folder):
    base = digest(folder / "model" / "model.safetensors")
    run = LORA | {"sequence_packing": True, "save_hf_model": True, "save_strategy": "steps", "save_steps": 2}
    run |= {"tensor_model_parallel_size": 2, "gradient_accumulation_steps": 1}
    done = launched(folder, "sft", "sft", **run)
    assert done.returncode == 0, done.stderr
    assert "% full" in done.stderr
    straight = logs(folder / "sft", "loss")
    assert len(straight) == 4
    first = digest(folder / "sft" / "hf" / "adapter_model.safetensors")
    again = launched(folder, "sft", "sft", **run, resume_from_checkpoint=str(folder / "sft" / "checkpoint-2"))
    assert again.returncode == 0, again.stderr
    assert logs(folder / "sft", "loss") == straight
    assert digest(folder / "sft" / "hf" / "adapter_model.safetensors") == first
    assert digest(folder / "model" / "model.safetensors") == base
    config = json.loads((folder / "sft" / "hf" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, True)
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    assert peft_takes(folder / "model", folder / "sft" / "hf") == 2 * 2 * 2
    on_with_preferences(folder)


def on_with_preferences(folder: Path) -> None:
    """``dpo`` of the adapter that ``sft`` left, on another layout, against the model without it."""
    changes = {"adapter_name_or_path": str(folder / "sft"), "pipeline_model_parallel_size": 2}
    done = launched(folder, "dpo", "dpo", **changes, eval_file=str(folder / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    losses, margins = (logs(folder / "dpo", key) for key in ("loss", "rewards/margins"))
    assert abs(losses[0] - 0.693147) > 1e-4  # that of an adapter that does nothing
    assert margins[-1] > margins[0]
    (accuracy,) = logs(folder / "dpo", "eval_rewards/accuracies")
    assert accuracy > 0.8


def peft_takes(model: Path, adapter: Path) -> int:
    """Factors of the adapter that are not zero once `peft` has loaded it."""
    import peft
    from transformers import AutoModelForCausalLM

    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    return sum(bool(p.abs().sum() > 0) for name, p in loaded.named_parameters() if "lora_" in name)


@pytest.mark.qualify
def test_a_reward_adapter_with_its_head_resumes_and_is_loaded_by_peft(folder):
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    run = LORA | {"lora_modules_to_save": ["score"], "sequence_packing": True, "save_hf_model": True}
    run |= {"save_strategy": "steps", "save_steps": 2, "pipeline_model_parallel_size": 2}
    run |= {"eval_file": str(folder / "rows.jsonl"), "metric_for_best_model": "accuracy"}
    done = launched(folder, "reward", "reward", **run)
    assert done.returncode == 0, done.stderr
    straight = logs(folder / "reward", "loss")
    assert straight[-1] < straight[0]
    (accuracy,) = logs(folder / "reward", "eval_accuracy")
    first = load_file(folder / "reward" / "hf" / "adapter_model.safetensors")
    again = launched(
        folder, "reward", "reward", **run, resume_from_checkpoint=str(folder / "reward" / "checkpoint-2")
    )
    assert again.returncode == 0, again.stderr
    assert logs(folder / "reward", "loss") == straight
    written = load_file(folder / "reward" / "hf" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], first[name]) for name in first)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, folder / "reward" / "hf")
    score = loaded.base_model.model.score.modules_to_save["default"].weight
    assert torch.equal(score.detach(), written["base_model.model.score.weight"])
    assert 0 <= accuracy <= 1


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sft", {"dpo_beta": 0.2}, "dpo_beta: for mca-train dpo, not sft"),
        ("sft", {"lora_alpha": 8}, "lora_alpha: lora_rank is not set"),
        ("dpo", {"dpo_loss": "sigmoyd"}, "dpo_loss must be 'sigmoid' or 'hinge'"),
        ("dpo", {"dpo_loss": "kto"}, "dpo_loss is 'kto'; it needs unpaired answers with a label"),
    ],
)
def test_keys_without_effect_raise_an_error(folder, kind, changes, message):
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    values = {"model_name_or_path": "m", "train_file": "f", "output_dir": str(folder / "none"), **changes}
    with pytest.raises(ValueError) as error:
        check(TASKS[kind], make_settings(TASKS[kind], values, "run.yaml")).require()
    assert message in str(error.value)


def run_example(folder: Path) -> list[float]:
    import runpy

    module = runpy.run_path(str(_ROOT / "examples" / "custom_loss" / "train.py"))
    losses: list[float] = quietly(lambda: module["train"](str(folder), 1))
    return losses


def test_the_worked_example_of_a_loss(tmp_path):
    (losses,) = run_ranks(1, run_example, tmp_path)
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
