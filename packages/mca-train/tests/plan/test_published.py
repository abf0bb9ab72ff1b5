"""Predicted speeds against those that Megatron-Bridge publishes with the misses that docs/validation/evidence.md has.

Source: docs/performance-summary.md and performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge, releases 25.09,
25.11 and 26.02, tables DGX-H100 and DGX-B200, all rows without FSDP but those of DeepSeek-V3; of DGX-GB200, DGX-GB300
and DGX-B300 a choice. Products are in fp8 but for gpt-oss and rows with HALF. What the rows do not say
(recomputation, overlap) is in scripts/performance/configs of the same repository.

The published runs keep no weights of layers in bf16 (fp8_param_gather), which mca does not support, and free the
outputs of virtual stages, which mca does with Megatron-core 0.18 and later.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_models.templates import config_from_hf
from mca_train.plan.counts import ModelCounts
from mca_train.plan.hardware import load_hardware
from mca_train.plan.memory import GIB, PlanInput, plan_layout
from mca_train.plan.search import largest_stage, predict_step_time, stages_over_limit, with_changes

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, **more: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads} | more


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3 8B": _LLAMA | _sizes(4096, 14336, 32, 32),
    "Llama-3 70B": _LLAMA | _sizes(8192, 28672, 80, 64),
    "Llama-3.1 405B": _LLAMA | _sizes(16384, 53248, 126, 128),
    "Qwen3 30B-A3B": _QWEN | _sizes(2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3 235B-A22B": _QWEN | _sizes(4096, 12288, 94, 64, moe_intermediate_size=1536),
    "gpt-oss 120B": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "attention_dropout": 0.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    }
    | _sizes(2880, 2880, 36, 64),
}
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
DROPPED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
MX = {"fp8_recipe": "mxfp8"}
HALF = {"fp8": None, "fp8_recipe": None}
H, B, GB200, GB300, B300 = "h100-80", "b200", "gb200", "gb300", "b300"
ROWS: list[Any] = [
    # model, release, device, how many, batch, micro-batch, length, (tp, pp, cp, vpp, ep), keys, published, ratio, fits
    ("Llama-3 70B", "25.09", H, 64, 128, 1, 8192, (4, 8, 1, 5, 1), {}, 1619, 0.92, True),
    ("Llama-3 70B", "25.11", H, 64, 128, 1, 8192, (4, 8, 1, 5, 1), {}, 1602, 0.93, True),
    ("Llama-3 70B", "26.02", H, 64, 256, 1, 8192, (4, 8, 1, 5, 1), {}, 1621, 0.93, True),
    ("Llama-3.1 405B", "25.09", H, 1024, 512, 1, 8192, (8, 8, 2, 8, 1), {}, 302, 1.01, True),
    ("Llama-3.1 405B", "25.11", H, 1024, 512, 1, 8192, (8, 8, 2, 8, 1), {}, 292, 1.04, True),
    ("Llama-3.1 405B", "26.02", H, 1024, 1536, 1, 8192, (8, 8, 2, 8, 1), {}, 311, 0.99, True),
    ("gpt-oss 120B", "25.11", H, 64, 512, 4, 4096, (1, 4, 1, 1, 8), {}, 5630, 1.04, False),
    ("gpt-oss 120B", "26.02", H, 64, 1280, 1, 4096, (1, 4, 1, 1, 8), AGAIN, 5993, 1.03, True),
    ("Qwen3 30B-A3B", "25.09", H, 16, 512, 2, 4096, (1, 2, 1, 24, 8), DROPPED, 10494, 0.74, True),
    ("Qwen3 30B-A3B", "25.11", H, 16, 512, 2, 4096, (1, 2, 1, 24, 8), {}, 5275, 1.42, True),
    ("Qwen3 30B-A3B", "26.02", H, 16, 1024, 1, 4096, (1, 2, 1, 12, 8), {}, 5113, 0.94, True),
    ("Qwen3 235B-A22B", "25.09", H, 256, 2048, 1, 4096, (2, 8, 1, 4, 32), DROPPED, 1204, 0.85, True),
    ("Qwen3 235B-A22B", "25.11", H, 256, 2048, 1, 4096, (2, 8, 1, 4, 32), OVERLAPPED, 1575, 1.00, True),
    ("Qwen3 235B-A22B", "26.02", H, 256, 8192, 1, 4096, (2, 8, 1, 4, 32), OVERLAPPED, 1633, 0.98, True),
    ("Llama-3 8B", "25.09", B, 8, 128, 2, 8192, (1, 1, 1, 1, 1), {}, 29994, 1.16, True),
    ("Llama-3 8B", "25.11", B, 8, 128, 2, 8192, (1, 1, 1, 1, 1), {}, 30624, 1.14, True),
    ("Llama-3.1 405B", "25.09", B, 128, 64, 1, 8192, (4, 8, 2, 8, 1), {}, 664, 1.14, True),
    ("Llama-3.1 405B", "25.11", B, 128, 64, 1, 8192, (4, 8, 2, 8, 1), {}, 661, 1.14, True),
    ("gpt-oss 120B", "25.11", B, 64, 512, 4, 4096, (1, 1, 1, 1, 8), {}, 8213, 2.09, True),
    ("gpt-oss 120B", "26.02", B, 64, 1280, 4, 4096, (1, 1, 1, 1, 64), {}, 8047, 1.09, True),
    ("Qwen3 30B-A3B", "25.09", B, 8, 512, 1, 4096, (1, 1, 1, 1, 8), DROPPED, 18066, 0.33, True),
    ("Qwen3 30B-A3B", "25.11", B, 8, 512, 1, 4096, (1, 1, 1, 1, 8), {}, 9299, 0.85, True),
    ("Qwen3 30B-A3B", "26.02", B, 8, 512, 1, 4096, (1, 1, 1, 1, 8), {}, 9691, 0.81, True),
    ("Qwen3 235B-A22B", "25.09", B, 64, 1024, 1, 4096, (1, 8, 1, 2, 8), DROPPED, 4104, 0.63, True),
    ("Qwen3 235B-A22B", "25.11", B, 64, 1024, 1, 4096, (1, 8, 1, 2, 8), OVERLAPPED, 3269, 1.10, True),
    ("Qwen3 235B-A22B", "26.02", B, 256, 8192, 1, 4096, (1, 8, 1, 1, 8), {}, 3805, 0.86, True),
    ("Llama-3 8B", "25.11", GB200, 8, 128, 2, 8192, (1, 1, 1, 1, 1), {}, 31508, 1.22, True),
    ("Llama-3 70B", "25.09", GB200, 64, 128, 1, 8192, (2, 4, 1, 5, 1), MX, 3546, 1.24, True),
    ("Llama-3 70B", "26.02", GB200, 64, 256, 1, 8192, (2, 4, 1, 5, 1), MX, 3613, 1.24, True),
    ("Llama-3.1 405B", "25.09", GB200, 128, 64, 1, 8192, (4, 8, 2, 8, 1), MX, 578, 1.48, True),
    ("Llama-3.1 405B", "25.11", GB200, 256, 1536, 1, 8192, (4, 16, 1, 4, 1), {}, 813, 1.08, True),
    ("Llama-3.1 405B", "26.02", GB200, 256, 1536, 1, 8192, (4, 16, 1, 8, 1), MX, 786, 1.12, True),
    ("gpt-oss 120B", "25.11", GB200, 64, 1280, 1, 8192, (1, 1, 1, 1, 64), {}, 15876, 1.06, True),
    ("gpt-oss 120B", "26.02", GB200, 64, 1280, 4, 4096, (1, 1, 1, 1, 64), AGAIN, 15784, 1.32, True),
    ("Qwen3 30B-A3B", "25.11", GB200, 8, 512, 4, 4096, (1, 1, 1, 1, 8), {}, 23766, 0.84, True),
    ("Qwen3 235B-A22B", "25.11", GB200, 256, 8192, 1, 4096, (1, 8, 1, 3, 32), HALF, 4916, 0.69, True),
    ("Qwen3 235B-A22B", "26.04", GB200, 256, 8192, 1, 4096, (1, 8, 1, 3, 32), {}, 5672, 0.63, True),
    ("Llama-3 8B", "25.11", GB300, 8, 128, 2, 8192, (1, 1, 1, 1, 1), {}, 37556, 1.02, True),
    ("Llama-3 70B", "26.02", GB300, 64, 256, 1, 8192, (1, 4, 1, 5, 1), MX, 4596, 1.04, False),
    ("Llama-3.1 405B", "25.11", GB300, 256, 1536, 1, 8192, (2, 8, 2, 4, 1), {}, 999, 0.97, True),
    ("Llama-3.1 405B", "26.02", GB300, 256, 1536, 1, 8192, (2, 8, 2, 4, 1), MX, 931, 1.04, False),
    ("gpt-oss 120B", "26.02", GB300, 64, 1280, 4, 4096, (1, 1, 1, 1, 64), {}, 19412, 1.09, True),
    ("Qwen3 30B-A3B", "26.02", GB300, 8, 512, 8, 4096, (1, 1, 1, 1, 8), {}, 30376, 0.80, True),
    ("Qwen3 235B-A22B", "25.11", GB300, 256, 8192, 2, 4096, (1, 4, 1, 12, 16), HALF, 6131, 0.71, True),
    ("gpt-oss 120B", "26.02", B300, 64, 1280, 4, 4096, (1, 1, 1, 1, 64), {}, 8359, 1.50, True),
    ("Qwen3 30B-A3B", "26.02", B300, 8, 512, 8, 4096, (1, 1, 1, 1, 8), {}, 29521, 0.79, True),
    ("Qwen3 235B-A22B", "26.02", B300, 256, 8192, 1, 4096, (1, 8, 1, 4, 8), {}, 2691, 1.25, True),
]
CONTRADICTORY = ("gpt-oss 120B", "25.11", H)
"""With the micro-batch and recomputation of its recipe it is the row of 26.02."""
MISSED = (
    ("Qwen3 30B-A3B", "25.11", H),
    ("gpt-oss 120B", "25.11", B),
    ("Qwen3 30B-A3B", "25.09", B),
    ("Qwen3 235B-A22B", "25.09", B),
    ("Llama-3.1 405B", "25.09", GB200),
    ("Qwen3 235B-A22B", "26.04", GB200),
    ("gpt-oss 120B", "26.02", B300),
)
DISORDERED = {
    ("Qwen3 235B-A22B", "25.11", B),
    ("gpt-oss 120B", "26.02", B),
    ("gpt-oss 120B", "26.02", GB200),
    ("Qwen3 235B-A22B", "25.11", GB200),
    ("Qwen3 235B-A22B", "25.11", GB300),
    ("Llama-3.1 405B", "26.02", GB300),
}
"""docs/validation/evidence.md says why. Qwen3 on GB200 and GB300 runs with HybridEP and CUDA graphs, which are not
modelled, and mxfp8 is predicted as fast as one scale for each tensor."""
APART = 1.05
"""Published speeds whose order is looked at; nearer ones say as much of the day as of the layout."""


def _args(row: Any, layout: ParallelLayout, folder: Path) -> TrainingArguments:
    name, release, device, gpus, batch, micro_batch, _, _, keys, *_ = row
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        bf16=True,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch // (gpus // layout.model_parallel_size),
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=True if layout.tp > 1 else None,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        accumulate_allreduce_grads_in_fp32=False,
        fp8=None if name.startswith("gpt") else "hybrid",
        fp8_recipe=None
        if name.startswith("gpt")
        else "mxfp8"
        if device != H and "Qwen" in name and release != "25.09"
        else "tensorwise",
    )
    return with_changes(args, keys)


def _layout(config: McaModelConfig, sizes: tuple[int, ...]) -> ParallelLayout:
    tp, pp, cp, vpp, ep = sizes
    ends = config.num_layers % (pp * vpp) != 0
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else None,
        account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
    )


@cache
def _counts(name: str) -> ModelCounts:
    return ModelCounts.for_model(config_from_hf(MODELS[name]))


def _ran(row: Any, folder: Path) -> tuple[float, bool, bool]:
    """Predicted tokens a second and device; whether the plan fits, and without weights of layers in bf16."""
    name, _, device, gpus, _, _, length, sizes, *_ = row
    counts, hardware = _counts(name), load_hardware(device)
    layout = _layout(counts.config, sizes)
    args = _args(row, layout, folder)
    subject = PlanInput(
        config=counts.config,
        seq_length=length,
        model=counts,
        implementation="transformer_engine",
        on_gpu=True,
        fp8_transposed=hardware.device.fp8_transposed,
    )
    time, plan = (
        predict_step_time(subject, args, layout, gpus, hardware),
        plan_layout(subject, args, layout, gpus),
    )
    half = 2 * max(count.total for count in counts.by_stage(layout, layers_only=True)) if args.fp8 else 0
    as_published = largest_stage(plan) - half <= hardware.device.usable_gib * GIB
    return (
        plan.tokens_per_step / time.total / gpus,
        not stages_over_limit(plan, hardware.device),
        as_published,
    )


def test_published_speeds_are_predicted_within_a_third_and_in_their_order_or_named_as_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "megatron_version", lambda: (0, 19, 2))
    found: dict[Any, tuple[float, float]] = {}
    for row in ROWS:
        *_, published, ratio, fits = row
        speed, fitted, fitted_as_published = _ran(row, tmp_path)
        assert speed / published == pytest.approx(ratio, abs=0.02), row
        assert (abs(speed / published - 1) <= 0.35) == (row[:3] not in MISSED), row
        assert fitted == fits, row
        assert fitted_as_published == (row[:3] != CONTRADICTORY), row
        if row[:3] not in MISSED:
            found[row[:3]] = published, speed
    for one, (its, predicted_one) in found.items():
        for other, (others, predicted_other) in found.items():
            if one[2] == other[2] and its > APART * others and not {one, other} & DISORDERED:
                assert predicted_one > predicted_other, (one, other)
