"""Predicted times of layers that differ from one another."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig, training_dtype
from mca_models.megatron.factory.transformer_config import Target, transformer_config
from mca_models.templates import config_from_hf
from mca_models.templates.parts.layer_costs import ExpertSizes
from mca_models.templates.parts.mamba import CHUNK, MAMBA_COSTS
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.chunks import ChunkSpec, Implementation
from mca_train.plan.counts import Count, ModelCounts
from mca_train.plan.hardware import Hardware, load_hardware
from mca_train.plan.memory import PlanInput
from mca_train.plan.search import predict_step_time, recomputations, with_changes
from mca_train.plan.sizes import Sizes
from mca_train.plan.speed import StepTime, StepTimeModel
from mca_train.plan.vision_memory import plan_images

ROOT = Path(__file__).parents[4]
QWEN3_8B = ROOT / "tools/recipes/qwen3-8b.json"
FOLDERS = (
    ROOT / "tools/recipes",
    *(ROOT / "packages/mca-models/tests/data" / n for n in ("configs", "vision_configs")),
)
WIDE: dict[str, Any] = {"num_attention_heads": 64, "num_query_groups": 16, "kv_channels": 256}


def seconds(folder: Path, **changes: Any) -> float:
    """Return the seconds of a step's passes through 4 layers on one rank."""
    config = config_from_hf(json.loads(QWEN3_8B.read_text()) | {"num_hidden_layers": 4})
    return step(folder, config.replace_fields(**changes)).passes


def step(folder: Path, config: McaModelConfig, *, again: tuple[str, ...] = (), **of_subject: Any) -> StepTime:
    """A step of ``config`` on one rank."""
    args = TrainingArguments(output_dir=str(folder), bf16=True, use_cpu=True, report_to="none")
    if again:
        args = with_changes(args, {"recompute_granularity": "selective", "recompute_modules": list(again)})
    subject = a_subject(config, **of_subject)
    return predict_step_time(subject, args, config.layout, 1, load_hardware("h100-80"))


def a_subject(config: McaModelConfig, **more: Any) -> PlanInput:
    values = {"implementation": "transformer_engine", "on_gpu": True} | more
    return PlanInput(config=config, seq_length=8192, model=ModelCounts.for_model(config), **values)


def model_of(name: str, **changes: Any) -> McaModelConfig:
    """A published model, of few layers."""
    file = next(path for folder in FOLDERS if (path := folder / f"{name}.json").exists())
    return config_from_hf(json.loads(file.read_text()) | changes)


def test_each_layer_takes_the_time_of_its_own_heads(tmp_path: Path) -> None:
    kinds = {"layer_type_overrides": {"sliding_attention": WIDE}}

    def of(*names: str) -> float:
        return seconds(tmp_path, layer_types=names, **kinds)

    full, wide = of(*["full_attention"] * 4), of(*["sliding_attention"] * 4)
    assert full == seconds(tmp_path)
    assert wide == seconds(tmp_path, **WIDE) > full
    assert of(*["full_attention", "sliding_attention"] * 2) == (full + wide) / 2


def test_narrow_values_and_keys_that_are_taken_save_time(tmp_path: Path) -> None:
    whole = seconds(tmp_path)
    assert seconds(tmp_path, value_channels=64) < whole
    assert seconds(tmp_path, values_are_keys=True) < whole
    assert seconds(tmp_path, num_kv_shared_layers=2) < whole
    assert seconds(tmp_path, attention_output_gate=True) > whole


def test_frozen_weights_have_no_gradients_and_a_reference_has_forward_passes(tmp_path: Path) -> None:
    config = model_of("qwen3-8b", num_hidden_layers=4)
    whole = step(tmp_path, config)
    adapted = step(tmp_path, config, adapter=ModelCounts(config, ()))
    assert 0.65 < adapted.passes / whole.passes < 0.85, "one of three products of each weight is left out"
    compared = step(tmp_path, config, forwards=1)
    assert (compared.passes, whole.extra_forward) == (whole.passes, 0.0)
    assert compared.total == pytest.approx(whole.total + compared.extra_forward)
    assert 0.25 < compared.extra_forward / compared.passes < 0.4, "a forward pass of three as long"
    assert step(tmp_path, config, forwards=3).extra_forward == pytest.approx(3 * compared.extra_forward)


def test_images_take_the_time_of_their_tower(tmp_path: Path) -> None:
    config = model_of("qwen3-vl-235b-a22b").replace_fields(num_layers=2, moe_layer_freq=None)
    passes = {}
    for parts in ((), ("language",), ("language", "vision")):
        images = plan_images(config, frozenset(parts), 8192, takes=True) if parts else None
        passes[parts] = step(tmp_path, config, media=images and PlannedMedia(images=images)).passes
    alone, frozen, trained = passes.values()
    assert trained - alone == pytest.approx(3 * (frozen - alone))
    each = (
        2 * 28**2 * 27 * (4 * 1152**2 + 2 * 1152 * 4304 + 2 * 1152 * 28**2)
    )  # of 27 layers; 28 x 28 patches
    least = each / 989e12 / 0.70
    assert least < (frozen - alone) / 8 < 1.2 * least, "of each of 8 samples"


def test_what_is_computed_again_takes_its_time(tmp_path: Path) -> None:
    config = model_of("qwen3-30b-a3b", num_hidden_layers=2)
    plain = step(tmp_path, config).passes
    some = step(tmp_path, config, again=("moe_act", "layernorm")).passes
    most = step(tmp_path, config, again=("moe",)).passes
    assert plain < some < most


@pytest.mark.parametrize(
    ("name", "implementation", "changes", "modules"),
    [
        ("qwen3-8b", "transformer_engine", {}, ["mlp"]),
        ("qwen3-30b-a3b", "transformer_engine", {}, ["moe_act", "layernorm"]),
        ("qwen3-30b-a3b", "transformer_engine", {"fp8": "hybrid"}, ["moe"]),
        ("qwen3-30b-a3b", "local", {}, ["moe"]),
        ("deepseek-v3", "transformer_engine", {}, ["mlp", "moe_act", "layernorm"]),
    ],
)
def test_a_search_tries_what_the_layers_can_compute_again(
    name: str, implementation: Implementation, changes: dict[str, Any], modules: list[str], tmp_path: Path
) -> None:
    settings = {"output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "report_to": "none"}
    args, config = TrainingArguments(**settings), model_of(name, num_hidden_layers=4)
    nothing, some, everything = recomputations(
        a_subject(config, implementation=implementation), with_changes(args, changes)
    )
    assert (nothing["recompute_granularity"], everything["recompute_granularity"]) == (None, "full")
    assert some["recompute_modules"] == modules
    given, target = TrainingArguments(**settings, **some), Target.planned(implementation)
    transformer_config(config, given, ParallelLayout(), training_dtype(config, given), target)  # takes them


def test_a_backward_pass_repeats_the_modules_that_are_recomputed(tmp_path: Path) -> None:
    """A dense MLP has four times the FLOPs of the scores of 8192 tokens."""
    config = model_of("qwen3-8b", num_hidden_layers=2)
    plain, mlp, scores = (
        step(tmp_path, config, again=names).passes for names in ((), ("mlp",), ("core_attn",))
    )
    assert mlp - plain > 2 * (scores - plain) > 0


@pytest.mark.parametrize("rank", [1536, None])
def test_mla_multiplies_hidden_states_by_every_projection(rank: int | None, tmp_path: Path) -> None:
    config = model_of("deepseek-v3", num_hidden_layers=4, q_lora_rank=rank)
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none")
    model = ChunkSpec(config, args, Sizes.for_training(config, args, 8192), "transformer_engine", True)
    times = StepTimeModel(model, RankGrid(config.layout, 1), load_hardware("h100-80"))
    down, heads = (rank or 0) + 512 + 64, 128
    up = (rank or 7168) * (128 + 64) + 512 * (128 + 128)
    assert times._attention(0)[0] == 7168 * down + heads * (up + 128 * 7168)


def time_model(
    folder: Path, config: McaModelConfig, layout: ParallelLayout, hardware: Hardware
) -> StepTimeModel:
    one: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "bf16": True,
        "use_cpu": True,
        "report_to": "none",
    }
    args = TrainingArguments(output_dir=str(folder), **one)
    config = replace(config, layout=layout)
    model = ChunkSpec(config, args, Sizes.for_training(config, args, 8192), "transformer_engine", True)
    return StepTimeModel(model, RankGrid(layout, max(layout.model_parallel_size, layout.ep)), hardware)


def moe_of(times: StepTimeModel) -> ExpertSizes:
    """Return the sizes of the model's experts."""
    moe = times.model.sizes.moe
    assert moe is not None
    return moe


def messages_alone() -> tuple[Hardware, float]:
    """Return a device without latency whose messages nothing hides, and its bytes per second."""
    h100 = load_hardware("h100-80")
    efficiency = replace(h100.efficiency, overlapped=0.0)
    device = replace(h100.device, link_us=0.0)
    return replace(h100, device=device, efficiency=efficiency), device.link_gb_s * efficiency.link * 1e9


def test_experts_are_sent_every_token_as_often_as_it_is_routed(tmp_path: Path) -> None:
    hardware, rate = messages_alone()
    config = model_of("deepseek-v3", num_hidden_layers=4)
    for ep in (2, 4):
        times = time_model(tmp_path, config, ParallelLayout(expert_model_parallel_size=ep), hardware)
        sent = 8192 * 8 * 7168 * 2 * (ep - 1) / ep  # tokens, experts of each, channels, bytes, to other ranks
        assert times._expert_messages(moe_of(times)) == pytest.approx(2 * sent / rate)


def test_experts_on_several_nodes_are_sent_the_tokens_that_leave_a_node(tmp_path: Path) -> None:
    hardware, _ = messages_alone()
    device = replace(hardware.device, network_us=0.0)
    rate = device.network_gb_s * hardware.efficiency.network * 1e9
    config = model_of("deepseek-v3", num_hidden_layers=4)
    layout = ParallelLayout(expert_model_parallel_size=16)
    times = time_model(tmp_path, config, layout, replace(hardware, device=device))
    sent = 8192 * 8 * 7168 * 2 * 8 / 16  # 8 of 16 ranks are on the other node
    assert times._expert_messages(moe_of(times)) == pytest.approx(2 * sent / rate)


def test_context_ranks_send_keys_and_values_of_every_token(tmp_path: Path) -> None:
    hardware, rate = messages_alone()
    config = model_of("qwen3-8b", num_hidden_layers=2)
    for tp, cp in ((1, 2), (1, 4), (2, 2)):
        times = time_model(
            tmp_path,
            config,
            ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp),
            hardware,
        )
        sent = 8192 // cp * 2 * (8 // tp) * 128 * 2  # tokens, keys and values, groups, channels, bytes
        assert times._context_messages(0, scores=1.0) == pytest.approx((cp - 1) * sent / rate)


def test_the_optimizer_reads_and_writes_the_rank_s_share_of_both_kinds_of_parameters(tmp_path: Path) -> None:
    h100 = load_hardware("h100-80")
    times = time_model(tmp_path, model_of("qwen3-8b", num_hidden_layers=2), ParallelLayout(), h100)
    rate = h100.device.memory_gb_s * h100.efficiency.memory * 1e9
    found = times.step([Count(8000, 0), Count(4000, 6000)], Count(4, 2)).optimizer
    assert found == pytest.approx(30 * (1000 + 3000) / rate)


def test_mamba_multiplies_every_channel_by_its_state_and_within_chunks() -> None:
    config: Any = SimpleNamespace(
        mamba=SimpleNamespace(mamba_num_heads=8, mamba_head_dim=4, mamba_state_dim=16, mamba_num_groups=1)
    )
    sizes: Any = SimpleNamespace(tokens=10, layout=SimpleNamespace(tp=2))
    within, states = (
        CHUNK * (8 * 4 + 2 * 16),
        2 * 8 * 4 * 16,
    )  # both ranks compute the products of the one group
    assert MAMBA_COSTS.flops(config, sizes) == 2 * 10 * (within + states) / 2


def test_a_step_is_its_passes_the_bubble_the_reduction_and_the_optimizer(tmp_path: Path) -> None:
    h100 = load_hardware("h100-80")
    layout = ParallelLayout(pipeline_model_parallel_size=2)
    model = time_model(tmp_path, model_of("qwen3-8b", num_hidden_layers=4), layout, h100)
    model.model.training.gradient_accumulation_steps = 4
    times = replace(model, grid=RankGrid(layout, 4))
    share = Count(2, 2)
    for roughly in (False, True):
        found = times.step([Count(10**9), Count(10**9)], share, forwards=1, roughly=roughly)
        parts = (found.passes, found.waiting, found.gradients, found.optimizer, found.extra_forward)
        assert all(part > 0 for part in parts)
        assert found.total == pytest.approx(sum(parts))
    assert found.waiting == pytest.approx(found.passes * (2 - 1) / 4)


def test_shared_experts_are_cut_by_tensor_ranks(tmp_path: Path) -> None:
    """Their share of a layer is what a model without them lacks."""
    config, h100 = model_of("deepseek-v3", num_hidden_layers=4), load_hardware("h100-80")
    assert config.moe is not None
    without = replace(config, moe=replace(config.moe, moe_shared_expert_intermediate_size=None))
    for tp in (1, 2):
        layout = ParallelLayout(tensor_model_parallel_size=tp)
        models = [time_model(tmp_path, each, layout, h100) for each in (config, without)]
        both = [each._experts(moe_of(each)) for each in models]
        flops = 2 * 8192 * 3 * 7168 * 2048 / tp
        seconds = flops / (h100.device.tflops * 1e12 * h100.efficiency.products)
        assert both[0].forward - both[1].forward == pytest.approx(seconds)


def test_tensor_ranks_gather_what_the_others_have(tmp_path: Path) -> None:
    hardware, rate = messages_alone()
    for tp in (2, 4):
        layout = ParallelLayout(tensor_model_parallel_size=tp)
        times = time_model(tmp_path, model_of("qwen3-8b", num_hidden_layers=2), layout, hardware)
        assert times._tensor_messages() == pytest.approx(4 * 8192 * 4096 * 2 * (tp - 1) / tp / rate)


def test_a_sliding_window_saves_the_scores_of_keys_outside_it(tmp_path: Path) -> None:
    """Count fewer keys for the queries before the window's end, of 8192."""
    h100 = load_hardware("h100-80")
    config = model_of("qwen3-8b", num_hidden_layers=2)
    whole, windowed = (
        time_model(tmp_path, config.replace_fields(**keys), ParallelLayout(), h100)._attention(1)
        for keys in ({}, {"window_size": 1024})
    )
    pairs = 1024 * 8192 - 1024**2 / 2
    assert windowed[0] == whole[0]
    assert windowed[1] / whole[1] == pytest.approx(pairs / (8192**2 / 2))


def test_ranks_that_share_an_expert_gather_its_tokens(tmp_path: Path) -> None:
    hardware, rate = messages_alone()
    config = model_of("qwen3-30b-a3b", num_hidden_layers=2)
    for tp in (2, 4):
        layout = ParallelLayout(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
        times = time_model(tmp_path, config, layout, hardware)
        sizes = times.model.sizes
        sent = sizes.split * 8 * 2048 * 2 * (tp - 1)  # tokens, experts of each, channels, bytes, other ranks
        assert times._expert_messages(moe_of(times)) == pytest.approx(2 * sent / rate)


def test_only_attention_and_shared_experts_gather_tokens_of_tensor_ranks(tmp_path: Path) -> None:
    """A layer spends a message of attention's half in both directions, and those with its experts."""
    hardware, _ = messages_alone()
    layout = ParallelLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    for name, halves in (("qwen3-30b-a3b", 1), ("deepseek-v3", 2)):
        times = time_model(tmp_path, model_of(name, num_hidden_layers=4), layout, hardware)
        gathered = times._tensor_messages() * halves / 2
        found = times._layer_time(3).messages / 2 - times._expert_messages(moe_of(times))
        assert found == pytest.approx(gathered)


@pytest.mark.parametrize(("distributed", "moved"), [(True, 4 + 2), (None, 4 + 4)])
def test_a_replicated_optimizer_sums_gradients_on_all_ranks_and_gathers_no_weights(
    distributed: bool | None, moved: int, tmp_path: Path
) -> None:
    """A reduce-scatter moves fp32 gradients once, and an all-gather bf16 weights; an all-reduce is twice the first."""
    hardware, rate = messages_alone()
    model = time_model(tmp_path, model_of("qwen3-8b", num_hidden_layers=2), ParallelLayout(), hardware)
    model.model.training.use_distributed_optimizer = distributed
    times = replace(model, grid=RankGrid(ParallelLayout(), 4))
    assert times._gradients(Count(8000)) == pytest.approx(8000 * moved * 3 / 4 / rate)
