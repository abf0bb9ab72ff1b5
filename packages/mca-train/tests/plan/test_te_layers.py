"""Tensors that a Transformer Engine layer saves per token, compared with sums by hand from the sources.

`integration_tests/parity/test_te_saved.py` looks at those sources.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_models.templates import config_from_hf
from mca_models.templates.parts.mla import latent_sizes, saved_core
from mca_train.plan import te_layers
from mca_train.plan.chunks import ChunkSpec, Implementation
from mca_train.plan.sizes import Sizes
from planned_training import make_plan

ROOT = Path(__file__).parents[4]
DATA = ROOT / "packages/mca-models/tests/data"
FOLDERS = (ROOT / "tools/recipes", DATA / "configs", DATA / "vision_configs")
TOKENS = 8192
CORE = {"recompute_granularity": "selective"}


def kept(
    name: str,
    folder: Path,
    number: int = 0,
    implementation: Implementation = "transformer_engine",
    **changes: Any,
) -> float:
    """Bytes of a token of layer ``number``."""
    args = TrainingArguments(
        output_dir=str(folder), bf16=True, use_cpu=True, report_to="none", per_device_train_batch_size=1
    )
    for key, value in changes.items():
        setattr(args, key, value)
    file = next(path for each in FOLDERS if (path := each / f"{name}.json").exists())
    config = config_from_hf(json.loads(file.read_text()))
    config = replace(config, layout=args.layout(config.layout))
    sizes = Sizes.for_training(config, args, TOKENS, on_gpu=True)
    return ChunkSpec(config, args, sizes, implementation, True).layer(number).kept / TOKENS


def test_core_attention_computed_again_keeps_its_inputs(tmp_path: Path) -> None:
    hidden, inner, query, key, heads = 4096, 14336, 4096, 1024, 32
    nothing = 2 * (4 * hidden + 2 * query + 2 * key + 3 * inner) + 4 * heads
    assert kept("llama-3.1-8b", tmp_path) == nothing
    again = (
        nothing - 2 * key - 4 * heads + 2 * (query + 2 * key)
    )  # values hold the projection that they are of
    assert kept("llama-3.1-8b", tmp_path, **CORE) == again
    both = {"recompute_modules": ["core_attn", "mlp"]}
    assert kept("llama-3.1-8b", tmp_path, **CORE | both) == again - 2 * (3 * inner + hidden)


def test_mlps_without_a_fused_activation_keep_both_factors(tmp_path: Path) -> None:
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        inner = {"llama-3.1-8b": 14336, "gemma-3-27b": 21504}[name]
        again = kept(name, tmp_path, **CORE | {"recompute_modules": ["mlp"]})
        hidden = {"llama-3.1-8b": 4096, "gemma-3-27b": 5376}[name]
        factors = 5 if name.startswith("gemma") else 3
        assert kept(name, tmp_path) - again == 2 * (factors * inner + hidden), name
    plain = kept("llama-3.1-8b", tmp_path)
    assert kept("llama-3.1-8b", tmp_path, bias_activation_fusion=False) == plain + 2 * 2 * 14336


def test_latent_attention_keeps_copies_and_not_what_they_are_of(tmp_path: Path) -> None:
    heads, hidden, inner, ranks = 128, 7168, 18432, 1536 + 512
    attention = 2 * heads * (2 * 192 + 2 * 128) + 4 * heads
    nothing = 2 * (4 * hidden + 3 * inner + 2 * ranks) + attention
    assert kept("deepseek-v3", tmp_path) == nothing
    again = kept("deepseek-v3", tmp_path, **CORE | {"recompute_modules": ["mla_up_proj"]})
    assert nothing - again == 2 * heads * (2 * 192 + 128) + 2 * ranks
    assert kept("deepseek-v3", tmp_path, **CORE) == nothing - 4 * heads  # copies are inputs of the kernel


def test_latent_attention_that_mca_computes_keeps_queries_keys_and_values_once(tmp_path: Path) -> None:
    config = config_from_hf(json.loads((DATA / "configs" / "deepseek-v3.json").read_text()))
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none")
    sizes = replace(Sizes.for_training(config, args, TOKENS, on_gpu=True), mca_attention=True)
    latent = latent_sizes(config)
    assert latent is not None
    lines = te_layers._latent_attention(config, latent, sizes)
    assert len(lines) > 2
    assert lines[2:] == saved_core(config, sizes)


def test_mcas_own_layers_and_attention_keep_as_much_within(tmp_path: Path) -> None:
    assert kept("qwen3-next-80b-a3b", tmp_path) > 300_000  # fp32, chunk by chunk
    assert kept("llama-3.1-8b", tmp_path, attention_backend="local") == kept("llama-3.1-8b", tmp_path) + 2 * (
        2 * 4096 - 2 * 1024  # keys and values of each head instead of each group's
    )


def test_recomputed_experts_keep_their_input_alone(tmp_path: Path) -> None:
    outputs: dict[Implementation, int] = {"transformer_engine": 2 * 7168, "local": 0}
    for implementation, of_norm in outputs.items():  # of that which is not fused with what is computed again
        one = {"implementation": implementation, **CORE}
        dense = kept("deepseek-v3", tmp_path, 0, **one, recompute_modules=["mlp"])
        assert kept("deepseek-v3", tmp_path, 3, **one, recompute_modules=["moe"]) == dense + of_norm


def test_the_projection_behind_attention_keeps_its_own_copy_in_fp8_with_delayed_scaling_alone(
    tmp_path: Path,
) -> None:
    delayed, tensorwise = {"fp8": "hybrid"}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    for name, query in (("llama-3.1-8b", 32 * 128), ("deepseek-v3", 128 * 128)):
        assert kept(name, tmp_path, **delayed) - kept(name, tmp_path, **tensorwise) == query


def test_a_norm_that_is_computed_again_keeps_its_input(tmp_path: Path) -> None:
    again = kept("qwen3-30b-a3b", tmp_path, **CORE | {"recompute_modules": ["layernorm"]})
    assert kept("qwen3-30b-a3b", tmp_path) - again == 2 * 2048


def test_the_inputs_of_an_adapter_are_kept_as_they_are(tmp_path: Path) -> None:
    config = config_from_hf(json.loads((ROOT / "tools/recipes/llama-3.1-8b.json").read_text()))

    def bytes_of(*, fp8: str | None, frozen: bool) -> float:
        args = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none")
        args.fp8 = fp8
        sizes = Sizes.for_training(config, args, TOKENS, frozen=frozen, on_gpu=True)
        return ChunkSpec(config, args, sizes, "transformer_engine", True).layer(0).kept

    half = bytes_of(fp8=None, frozen=False)
    assert bytes_of(fp8="hybrid", frozen=False) < half, "products keep what they take in fp8"
    assert bytes_of(fp8="hybrid", frozen=True) == bytes_of(fp8=None, frozen=True) == half


@pytest.mark.parametrize(
    ("ranks", "others"), [(8, 8 * 8), (64, 64 * 2)], ids=["experts for all choices", "two experts"]
)
def test_the_worst_routing_sends_all_that_could_be_sent_to_a_rank(
    ranks: int, others: int, tmp_path: Path
) -> None:
    """``others``: choices of one token of every rank of the group that experts of one rank can be."""
    file = ROOT / "tools/recipes/qwen3-30b-a3b.json"
    layers, hidden, inner, topk = 48, 2048, 768, 8
    args = TrainingArguments(
        output_dir=str(tmp_path),
        bf16=True,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=1,
        expert_model_parallel_size=ranks,
    )
    config = config_from_hf(json.loads(file.read_text()))
    plan = make_plan(config, args, TOKENS, ranks, implementation="transformer_engine", on_gpu=True)
    of_each = 2 * (hidden + 3 * inner)  # as sent, gate and up, and the second product's input
    assert plan.stages[0].worst_routing == layers * TOKENS * (others - topk) * of_each
    limit = Sizes.for_training(replace(config, layout=plan.layout), args, TOKENS, on_gpu=True)
    assert replace(limit, capacity=1.5).dispatched(worst=True) == 1.5 * TOKENS * topk


def test_experts_padded_to_their_capacity_are_sent_as_much(tmp_path: Path) -> None:
    factor = {"moe_expert_capacity_factor": 1.5}
    padded = factor | {"moe_pad_expert_input_to_capacity": True}
    plain, most = kept("qwen3-30b-a3b", tmp_path), kept("qwen3-30b-a3b", tmp_path, **padded)
    assert kept("qwen3-30b-a3b", tmp_path, **factor) == plain
    assert most - plain == pytest.approx(0.5 * 8 * 2 * (2048 + 3 * 768))
