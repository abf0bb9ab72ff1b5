"""Plans of published models, compared with arithmetic on their sizes."""

import os
from pathlib import Path
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.errors import McaError
from mca_models.templates import config_from_hf
from mca_train.config.model import model_config
from planned_training import make_plan

GIB = 1024**3
LAYERS, HIDDEN, EXPERTS, WIDTH, VOCABULARY = 48, 2048, 128, 768, 151936
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
OF_EXPERTS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH
ATTENTION = 2 * HIDDEN * 32 * 128 + 2 * HIDDEN * 4 * 128 + 2 * 128
DENSE = 2 * VOCABULARY * HIDDEN + HIDDEN + LAYERS * (ATTENTION + 2 * HIDDEN + EXPERTS * HIDDEN)


def optimizer_of(tmp_path: Any, **changes: Any) -> int:
    """Bytes of the optimizer on a rank of the only stage."""
    settings = {"output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(**settings | changes)
    plan = make_plan(config_from_hf(QWEN3_30B_A3B), args, 4096, 8)
    assert plan.total_parameters == DENSE + OF_EXPERTS
    return plan.stages[0].optimizer


@pytest.mark.parametrize(
    ("layout", "dense", "experts"),
    [
        ({"expert_model_parallel_size": 8}, 1 / 8, 1 / 8),
        ({"expert_model_parallel_size": 4}, 1 / 8, 1 / 4 / 2),
        ({"expert_tensor_parallel_size": 2}, 1 / 8, 1 / 2 / 4),
        ({"use_distributed_optimizer": False, "expert_model_parallel_size": 8}, 1, 1 / 8),
    ],
)
def test_the_state_of_experts_is_divided_over_the_ranks_that_hold_the_same(layout, dense, experts, tmp_path):
    found = optimizer_of(tmp_path, **{"use_distributed_optimizer": True} | layout)
    assert found == pytest.approx(12 * (DENSE * dense + OF_EXPERTS * experts), rel=1e-6)


def test_qwen3_30b_a3b_on_eight_ranks(tmp_path):
    found = optimizer_of(tmp_path, use_distributed_optimizer=True, expert_model_parallel_size=8)
    assert found / GIB == pytest.approx(42.7, abs=0.05)


def test_the_first_stage_of_llama_405b_on_1024_ranks(tmp_path):
    """54 GiB by the engine itself, which takes 100 s. A micro-batch less would be 3.3 GiB less."""
    settings = {"output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "report_to": "none"}
    settings |= {
        "tensor_model_parallel_size": 8,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 16,
    }
    settings |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    args = TrainingArguments(
        **settings,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=32,
        use_distributed_optimizer=True,
    )
    stage = make_plan(config_from_hf(LLAMA_405B), args, 4096, 1024).stages[0]
    assert stage.in_flight == 16
    assert (stage.activations + stage.temporaries) / GIB == pytest.approx(54, abs=1)


@pytest.mark.parametrize(
    "make,said",
    [
        (os.mkfifo, "not a file but a directory, pipe or device"),
        (lambda file: file.write_bytes(b'{"model_type": "ll\xe4ma"}'), "expected UTF-8"),
        (lambda file: file.write_text("[" * 100_000), "nested too deeply"),
        (lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), 1 << 40), "it is damaged"),
        (lambda file: file.symlink_to("/proc/self/environ"), "leads out of the directory"),
        (lambda file: file.write_text('{"model_type": "llama"}'), "has no 'num_hidden_layers'"),
    ],
    ids=["pipe", "latin", "deep", "huge", "link", "short"],
)
def test_a_models_configuration_is_read_with_suspicion(make: Any, said: str, tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(McaError, match=said) as caught:
        model_config(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_adam_on_the_cpu_works_on_a_ranks_share_of_the_largest_parameter(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "bf16": True,
        "use_cpu": True,
        "report_to": "none",
    }
    found = {}
    for distributed in (False, True):
        args = TrainingArguments(**settings, use_distributed_optimizer=distributed)
        found[distributed] = make_plan(config_from_hf(LLAMA_405B), args, 1, 2).stages[0].temporaries
    assert found[False] == 4 * 128256 * 16384
    assert found[True] <= found[False] / 2, "of two ranks; less where a layer needs more than the optimizer"
