import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
}


@pytest.fixture
def run(tmp_path):
    """A configuration file, complete but for weights; changes given as arguments."""
    from tokenizers_for_tests import byte_tokenizer

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    byte_tokenizer().save_pretrained(model)
    (tmp_path / "a.jsonl").write_text('{"text": "hello there"}\n')

    def write(**changes):
        values = {
            "model_name_or_path": str(model),
            "train_file": str(tmp_path / "a.jsonl"),
            "output_dir": str(tmp_path / "out"),
            "seq_length": 64,
        }
        text = "".join(f"{k}: {json.dumps(v)}\n" for k, v in (values | changes).items() if v is not ...)
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def own_threads(monkeypatch):
    """Restore the environment that the command changes."""
    for name in ("OMP_NUM_THREADS", "MCA_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "1")
