"""LLaMA-Factory 0.9.5 trains on mca through ``mcore_adapter`` with the losses of the Hugging Face run that it makes.

    uv venv -p 3.11 .venv-llamafactory
    uv pip install -p .venv-llamafactory llamafactory==0.9.5 -e packages/mca-config -e packages/mca-models \
        -e packages/mca-train
    pytest -n 0 -m qualify integration_tests/cli/test_llamafactory.py
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from harness import free_port
from mca_train.clients import client_path

PYTHON = Path(__file__).parents[2] / ".venv-llamafactory/bin/python"

pytestmark = [
    pytest.mark.qualify,
    pytest.mark.ranks,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-llamafactory with llamafactory==0.9.5"),
]

WORDS = "the quick brown fox jumps over a lazy dog red blue river mountain sun moon star what where who is".split()

RANKS = """
import json, os, sys, traceback
import torch
torch.set_num_threads(1)
from llamafactory.train import tuner
if "USE_MCA" in os.environ:
    import llamafactory.train.mca.workflow
ranks, port, run = json.loads(sys.argv[1])
children = []
for rank in range(ranks):
    if child := os.fork():
        children.append(child)
        continue
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        tuner.run_exp(run)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
sys.exit(any(status for _, status in [os.waitpid(child, 0) for child in children]))
"""
"""Program that imports LLaMA-Factory once and forks the ranks of a run."""


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    drawn = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(low, high)))

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, letters = ["<|pad|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters)
    tokens.train_from_iterator([text(30, 30) for _ in range(50)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=special[2], pad_token=special[0])
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=416,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    samples = [{"instruction": text(3, 12), "input": "", "output": text(3, 20)} for _ in range(96)]
    (tmp_path / "sft.json").write_text(json.dumps(samples))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"sft": {"file_name": "sft.json"}}))
    return {
        "model_name_or_path": str(tmp_path / "model"),
        "do_train": True,
        "stage": "sft",
        "finetuning_type": "full",
        "dataset_dir": str(tmp_path),
        "dataset": "sft",
        "template": "qwen",
        "cutoff_len": 128,
        "preprocessing_num_workers": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "report_to": "none",
        "train_sampling_strategy": "sequential",
    }


def losses(run: dict[str, Any], output: Path, ranks: int, **environment: str) -> list[float]:
    """Return the loss of each step of a run of LLaMA-Factory."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = json.dumps([ranks, free_port(), {**run, "output_dir": str(output)}])
    done = subprocess.run(
        [PYTHON, "-c", RANKS, words], env=os.environ | offline | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_sft_has_the_losses_of_the_hugging_face_run(run, tmp_path):
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    facade = {"USE_MCA": "1", "PYTHONPATH": str(client_path("mcore_adapter"))}
    ours = losses(run | layout, tmp_path / "mca", 4, **facade)
    theirs = losses(run, tmp_path / "hf", 1)
    assert len(ours) == 20
    assert ours == pytest.approx(theirs, rel=1e-6)
