"""Model FLOP by the formula in the module, counted by hand."""

import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mca_models.templates import config_from_hf
from mca_train.metrics.throughput import PEAK_TFLOPS, peak_flops, peak_memory
from mca_train.plan.hardware import load_hardware

SIZE = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 64,
}
ATTENTION = 8 * (2 * 6 + 2 * 6) + 2 * 6 * 8  # queries, keys and values; and the projection back
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 4}
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 10,
    "head_dim": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def flops(**hf):
    from mca_train.metrics.throughput import ModelFlops

    return ModelFlops.from_config(config_from_hf(SIZE | hf))


def test_a_dense_model():
    found = flops(**QWEN3)
    assert found.per_token == 6 * (3 * (ATTENTION + 3 * 8 * 12) + 100 * 8)
    assert found.per_square == 6 * 3 * 2 * 6
    assert found.for_tokens(20, 15**2 + 5**2) == 20 * found.per_token + 250 * found.per_square


def test_only_layers_with_attention_have_a_squared_part():
    found = flops(
        **{"model_type": "nemotron_h", "head_dim": 6, "hybrid_override_pattern": "M-*MM"},
        **{"mamba_num_heads": 2, "mamba_head_dim": 4, "n_groups": 1, "ssm_state_size": 3, "conv_kernel": 4},
    )
    assert found.per_square == 6 * 1 * 2 * 6
    mamba = 8 * (2 * 8 + 2 * 3 + 2) + (8 + 2 * 3) * 4 + 8 * 8
    assert found.per_token == 6 * (ATTENTION + 2 * 8 * 12 + 3 * mamba + 100 * 8)


def test_each_layer_counts_with_its_own_heads():
    from mca_train.metrics.throughput import ModelFlops

    kinds = {"sliding_attention": {"num_attention_heads": 4, "kv_channels": 10, "value_channels": 6}}
    layers = ("full_attention", "sliding_attention", "full_attention")
    config = replace(config_from_hf(SIZE | QWEN3), layer_types=layers, layer_type_overrides=kinds)
    assert ModelFlops.from_config(config).per_square == 6 * (2 * 2 * 6 + 4 * (10 + 6) / 2)


def test_of_experts_only_the_chosen_count():
    found = flops(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
        num_experts=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **EXPERTS,
    )
    assert found.per_token == 6 * (3 * (ATTENTION + 4 * 8 + 2 * 3 * 8 * 4) + 100 * 8)


def test_a_prediction_layer_is_a_layer_and_uses_the_output_layer_again():
    hf = EXPERTS | LATENT | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    hf |= {"scoring_func": "sigmoid", "norm_topk_prob": True, "tie_word_embeddings": False}
    assert flops(**hf, num_nextn_predict_layers=0).per_square == 6 * 3 * 2 * (6 + 10) / 2
    without, more = flops(**hf, num_nextn_predict_layers=0), flops(**hf, num_nextn_predict_layers=1)
    attention = 8 * 4 + 4 * 2 * 6 + 8 * (6 + 2) + 6 * 2 * (4 + 10) + 2 * 10 * 8
    experts = 8 * 4 + 3 * 3 * 8 * 4  # the router, two chosen and a shared one
    assert more.per_token - without.per_token == 6 * (2 * 8 * 8 + attention + experts + 100 * 8)
    assert more.per_square - without.per_square == 6 * 2 * (6 + 10) / 2


def test_an_adapters_frozen_weights_get_no_gradient():
    from mca_models.lora.config import AdapterConfig
    from mca_models.lora.rules import rules_for_training
    from mca_train.metrics.throughput import ModelFlops

    config = config_from_hf(SIZE | QWEN3 | {"tie_word_embeddings": False})
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    adapter |= {"task_type": "CAUSAL_LM", "bias": "none", "modules_to_save": ["lm_head"]}
    rules = rules_for_training(config, AdapterConfig.from_dict(adapter))
    layers = 3 * (ATTENTION + 3 * 8 * 12)
    factors = 3 * 2 * (8 + 12 + 12 + 8)
    assert ModelFlops.from_config(config, rules).per_token == 4 * layers + 6 * factors + 6 * 100 * 8


def test_a_frozen_text_model_gets_no_gradient():
    from mca_train.metrics.throughput import Throughput

    config = config_from_hf(SIZE | QWEN3).replace_fields(vision_fields={"image_token_id": 5})
    layout = SimpleNamespace(bubble=lambda steps: 0.0)
    ranks = SimpleNamespace(device=SimpleNamespace(type="cpu"), layout=layout)

    def counted(freeze):
        args = SimpleNamespace(freeze=freeze, gradient_accumulation_steps=1)
        return Throughput(args, SimpleNamespace(config=config), ranks)._flops

    weights = 3 * (ATTENTION + 3 * 8 * 12) + 100 * 8
    assert counted(["language"]).per_token == 4 * weights
    assert counted(["vision"]).per_token == counted(None).per_token == 6 * weights


@pytest.mark.parametrize(
    "name,peak",
    [
        ("NVIDIA GB300", 2500),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200 NVL", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_the_peak_is_of_the_named_gpu_and_of_none_with_a_longer_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for dtype in ("bfloat16", "float16"):
        assert peak_flops(SimpleNamespace(), dtype, torch.device("cuda")) == (peak and peak * 1e12)
    assert peak_flops(SimpleNamespace(), "float32", torch.device("cuda")) is None


def test_the_peak_of_a_device_that_a_plan_knows_is_the_same_there():
    for device in ("h100-80", "h200", "b200", "gb200", "gb300", "b300"):
        name = device.partition("-")[0].upper()
        assert PEAK_TFLOPS[name] == load_hardware(device).device.tflops, device


def test_the_peak_is_what_is_given_or_unknown():
    class Arguments:
        peak_tflops = 2.5

    assert peak_flops(Arguments, "bfloat16", torch.device("cpu")) == 2.5e12
    Arguments.peak_tflops = None
    assert peak_flops(Arguments, "bfloat16", torch.device("cpu")) is None


def test_the_peak_without_a_gpu_is_that_of_the_process():
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak_memory(torch.device("cpu")) * 2**30 == pytest.approx(most, rel=0.05)


def test_the_peak_of_a_gpu_is_what_torch_allocated_there_in_gib(monkeypatch):
    allocated = {"cuda:1": 3 * 2**29}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated[str(device)])
    assert peak_memory(torch.device("cuda:1")) == 1.5
