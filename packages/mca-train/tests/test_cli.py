import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_train.cli import main

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


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MCA_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def run(tmp_path):
    """A configuration file, complete but for weights; changes given as arguments."""
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xyzzy", "c.yaml"], "unknown command 'xyzzy'; see mca-train --help"),
        (["pretrian", "c.yaml"], "unknown command 'pretrian'; did you mean 'pretrain'?"),
        (["sft"], "mca-train sft needs a configuration file"),
        (["sft", "--bf16"], "mca-train sft needs a configuration file"),
        (["plan", "none.yaml"], "configuration file none.yaml does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"learning_rte": 1}, [], "unknown key 'learning_rte' in"),
        ({}, ["--tensor-model-paralel-size", "2"], "did you mean 'tensor_model_parallel_size'?"),
        ({"learning_rate": "fast"}, [], "learning_rate is 'fast'; expected a number"),
        ({"output_dir": ...}, [], "missing output_dir"),
        ({"overlap_param_gather": True}, [], "use_distributed_optimizer"),
        ({"seq_length": 1}, [], "seq_length is 1; expected at least 2"),
        ({"bf16": True, "fp16": True}, [], "bf16 excludes fp16"),
    ],
)
def test_wrong_configurations_are_one_line_and_2(run, changes, flags, message, capsys):
    assert main(["pretrain", run(**changes), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": "/none"}, "model_name_or_path: directory /none does not exist"),
        ({"train_file": "/none.jsonl"}, "train_file: file /none.jsonl does not exist"),
        ({"train_file": ...}, "train_file is not set"),
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size 3"),
        ({"tensor_model_parallel_size": 2, "local_ranks": 3}, "3"),
        ({"eval_strategy": "steps"}, "eval_file is not set"),
    ],
)
def test_what_cannot_run_is_one_error_and_1(run, changes, message, capsys, tmp_path):
    assert main(["pretrain", run(**changes)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: ") for line in error)
    assert message in "\n".join(error)
    assert not (tmp_path / "out").exists()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from mca_train.cli import main; main(['--help']); "
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "examples:" in done.stdout


def test_plan_needs_no_weights(run, capsys):
    path = run(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        gradient_accumulation_steps=4,
        local_ranks=8,
    )
    assert main(["plan", path]) == 0
    text = capsys.readouterr().out
    assert "data parallel 2" in text
    assert "bubble       20.0%" in text
    assert "2-3 head" in text


def test_plan_of_an_adapter_and_of_a_reference(run, capsys):
    assert main(["plan", run(lora_rank=4)]) == 0
    adapted = capsys.readouterr().out
    assert "trained (LoRA)" in adapted
    assert "reference" not in adapted
    assert main(["plan", run(dpo_beta=0.2)]) == 0
    assert "reference" in capsys.readouterr().out
    assert main(["plan", run(dpo_beta=0.2, lora_rank=4)]) == 0
    assert "reference" not in capsys.readouterr().out


def test_an_impossible_plan_says_all_reasons(run, capsys):
    assert main(["plan", run(tensor_model_parallel_size=3, pipeline_model_parallel_size=3)]) == 1
    text = capsys.readouterr().out
    assert text.count("  - ") >= 2


def test_readme_and_docs_name_the_keys_of_the_data():
    from mca_train.arguments import DataArguments, LaunchArguments

    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    for cls in (DataArguments, LaunchArguments):
        for name in cls.__dataclass_fields__:
            assert f"`{name}`" in text, name
