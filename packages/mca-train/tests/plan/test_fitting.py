"""Runs that fit on a device, remedies for the others, and the table of devices."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.errors import UsageError
from mca_config.layout import ParallelLayout
from mca_config.parser import from_namespace
from mca_models.megatron import platform
from mca_models.templates import config_from_hf
from mca_train.plan import search
from mca_train.plan.counts import ModelCounts
from mca_train.plan.hardware import load_hardware
from mca_train.plan.memory import GIB, Plan, PlanInput, minimum_memory, plan_layout
from mca_train.plan.options import PlanOptions
from mca_train.plan.search import (
    FULL,
    _larger,
    _layouts,
    candidates,
    find_remedies,
    fitting_layouts,
    largest_stage,
    stages_over_limit,
    with_changes,
)
from mca_train.reference.program import program

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def planned(tmp_path: Path, **changes: Any) -> tuple[PlanInput, TrainingArguments, Plan]:
    settings = {"output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(**settings | {"use_distributed_optimizer": True} | changes)
    config = config_from_hf(LLAMA_8B)
    subject = PlanInput(
        config=config,
        seq_length=8192,
        model=ModelCounts.for_model(config),
        implementation="transformer_engine",
        on_gpu=True,
    )
    return subject, args, plan_layout(subject, args, args.layout(config.layout), 8)


def test_what_transformer_engine_keeps_of_a_layer(tmp_path: Path) -> None:
    _, _, plan = planned(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    tokens, hidden, inner, key = 8192, 4096, 14336, 1024
    norms = 2 * 2 * hidden  # inputs of both norms and what they give
    attention = (hidden + 2 * key) + hidden  # queries, keys, values; their output
    layer = tokens * (
        2 * (norms + attention + 3 * inner) + 4 * 32
    )  # gate and up, their product; sums in fp32
    ends = tokens * (2 * 2 * hidden + 4 * 128256)  # the final norm, the softmax
    assert plan.stages[0].activations == pytest.approx(32 * layer + ends, rel=1e-6)
    assert plan.stages[0].temporaries == pytest.approx(tokens * 2 * 128256, rel=1e-6)


def test_a_global_batch_is_of_all_accumulated_samples_of_all_replicas(tmp_path: Path) -> None:
    subject, args, plan = planned(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert (plan.global_batch, plan.tokens_per_step) == (3 * 5 * 8, 3 * 5 * 8 * 8192)
    pairs = plan_layout(replace(subject, sequences=2), args, plan.layout, 8)
    assert (pairs.global_batch, pairs.tokens_per_step) == (plan.global_batch, 2 * plan.tokens_per_step)


def test_a_reference_that_is_freed_before_training_is_not_part_of_the_least_memory(tmp_path: Path) -> None:
    subject, args, plan = planned(tmp_path)
    least = minimum_memory(subject, args, plan.layout, 8)
    assert least == plan.stages[0].weights + plan.stages[0].gradients + plan.stages[0].optimizer
    compared = replace(subject, reference=subject.model)
    assert minimum_memory(compared, args, plan.layout, 8) == least + plan.stages[0].weights
    assert minimum_memory(replace(compared, precomputed=True), args, plan.layout, 8) == least


def test_what_does_not_fit_is_found_with_what_makes_it_fit(tmp_path: Path) -> None:
    device = load_hardware("h100-80").device
    subject, args, plan = planned(tmp_path, per_device_train_batch_size=1)
    assert stages_over_limit(plan, device) == [0]
    found = find_remedies(subject, args, plan.layout, 8, device)
    assert found and all(remedy.fits for remedy in found)
    for remedy in found:
        if "tensor_model_parallel_size" in remedy.changes or "pipeline_model_parallel_size" in remedy.changes:
            continue
        again = plan_layout(subject, with_changes(args, remedy.changes), plan.layout, 8)
        assert largest_stage(again) == remedy.needs <= device.usable_gib * GIB
    assert not stages_over_limit(plan, load_hardware("b200").device)


def test_rows_that_are_evaluated_at_once_are_planned(tmp_path: Path) -> None:
    keys = {"per_device_train_batch_size": 1, "use_distributed_optimizer": True} | FULL
    subject, args, plan = planned(tmp_path, **keys)
    assert args.per_device_eval_batch_size == 8
    (stage,) = plan_layout(replace(subject, evaluated=True), args, plan.layout, 8).stages
    logits = 128256 * (2 + 4)  # in bf16, and their softmax in fp32
    hidden = 3 * 2 * 4096  # what the last layer gives, and the final norm's input and output
    assert stage.evaluation == 8 * 8192 * (logits + hidden)
    held = stage.weights + stage.gradients + stage.optimizer
    assert stage.total == held + stage.evaluation > plan.stages[0].total
    device = load_hardware(f"gib:{plan.stages[0].total / GIB + 5}").device
    found = find_remedies(replace(subject, evaluated=True), args, plan.layout, 8, device)
    assert found[0].changes == {"per_device_eval_batch_size": 1} and found[0].fits
    for one in fitting_layouts(replace(subject, evaluated=True), args, 8, 8, load_hardware("gib:1000")):
        assert one.changes["per_device_eval_batch_size"] == one.changes["per_device_train_batch_size"]


def test_gradients_in_half_precision_are_copied_for_the_step(tmp_path: Path) -> None:
    keys = {"use_distributed_optimizer": None, "per_device_train_batch_size": 1} | FULL
    _, _, single = planned(tmp_path, **keys)
    _, _, half = planned(tmp_path, accumulate_allreduce_grads_in_fp32=False, **keys)
    parameters = half.stages[0].parameters
    assert half.stages[0].gradients == 2 * parameters == single.stages[0].gradients // 2
    assert half.stages[0].temporaries == 4 * parameters and half.stages[0].activations == 0


@pytest.mark.parametrize(
    ("device", "recipe", "copies"),
    [("h100-80", "tensorwise", 2), ("gb200", "tensorwise", 1), ("gb200", None, 1), ("gb200", "mxfp8", 2)],
)
def test_a_weight_has_a_transposed_copy_in_fp8_where_products_take_one(
    device: str, recipe: str | None, copies: int, tmp_path: Path
) -> None:
    subject, args, plan = planned(tmp_path, fp8="hybrid", fp8_recipe=recipe)
    subject = replace(subject, fp8_transposed=load_hardware(device).device.fp8_transposed)
    plan = plan_layout(subject, args, plan.layout, 8)
    (stage,) = plan.stages
    assert plan.fp8_copies == copies
    ends = 2 * 128256 * 4096 + 4096  # embedding, output layer and final norm stay in bf16
    assert stage.weights == 2 * stage.parameters + copies * (stage.parameters - ends)


@pytest.mark.parametrize(("version", "freed"), [((0, 16, 1), False), ((0, 19, 2), True)])
def test_outputs_of_virtual_stages_stay_where_megatron_does_not_wait_for_sends(
    version: tuple[int, ...], freed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "megatron_version", lambda: version)
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 16}
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} | stages | FULL
    _, _, plan = planned(tmp_path, **keys)
    first, between = plan.stages[0], 8192 * 4096 * 2
    assert first.activations == first.in_flight * between * (1 if freed else 2)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_remedies_are_what_the_run_takes_and_keep_the_batch(optimizer: str, tmp_path: Path) -> None:
    keys = {"optimizer": optimizer, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2} | FULL
    of_adam = ("optimizer_cpu_offload", "use_distributed_optimizer")
    seen: set[str] = set()
    for gib in (20, 60, 100, 150):  # each makes other changes fit
        subject, args, plan = planned(tmp_path, use_distributed_optimizer=None, **keys)
        found = find_remedies(subject, args, plan.layout, 8, load_hardware(f"gib:{gib}").device)
        for remedy in found:
            seen |= remedy.changes.keys()
            again = with_changes(args, remedy.changes)
            TrainingArguments(**{"output_dir": str(tmp_path), "use_cpu": True, **keys, **remedy.changes})
            assert plan_layout(subject, again, again.layout(), 8).global_batch == plan.global_batch
    assert seen >= {"per_device_train_batch_size", "pipeline_model_parallel_size"}
    assert (optimizer == "adam") == bool(seen & {*of_adam})


@pytest.mark.parametrize(("group", "stages"), [(None, {2, 4, 8}), (4, {2, 4}), (2, {2})])
def test_remedies_multiply_tensor_ranks_and_the_stages_that_virtual_ones_allow(
    group: int | None, stages: set[int]
) -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    training: Any = SimpleNamespace(microbatch_group_size_per_vp_stage=group, gradient_accumulation_steps=8)
    dense: Any = SimpleNamespace(config=SimpleNamespace(num_experts=0))
    found = [
        (each.get("tensor_model_parallel_size", 1), each.get("pipeline_model_parallel_size", 2))
        for each in list(_larger(dense, training, layout))[::2]
    ]
    every = [(2, 2), (1, 4), (2, 4), (1, 8), (4, 4), (8, 8)]
    assert found == [sizes for sizes in every if sizes[1] in stages]


def test_micro_batches_of_one_and_a_divided_optimizer_are_suggested_together_where_ranks_share_parameters(
    tmp_path: Path,
) -> None:
    keys = {
        "use_distributed_optimizer": None,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }
    subject, args, plan = planned(tmp_path, **keys)
    device = load_hardware("gib:130").device
    smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    found = find_remedies(subject, args, plan.layout, 8, device)
    assert found[0].changes == {"use_distributed_optimizer": True} | smaller and found[0].fits
    alone = find_remedies(subject, args, plan.layout, 1, device)
    assert alone[0].changes == smaller and not any(
        "use_distributed_optimizer" in one.changes for one in alone
    )


def test_what_a_search_writes_replaces_the_virtual_stages_of_a_checkpoint(tmp_path: Path) -> None:
    subject, args, _ = planned(tmp_path)
    base = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    subject = replace(subject, config=replace(subject.config, layout=base))
    found = list(fitting_layouts(subject, args, 8, 2, load_hardware("gib:1000")))
    assert {each.layout.vpp for each in found if each.layout.pp == 2} == {1, 2, 4, 8, 16}
    for each in found:
        assert with_changes(args, each.changes).layout(base) == each.layout


NUMBERS = (
    "memory_gib = 30\ntflops = 100\nfp8_tflops = 200\nmemory_gb_s = 900\nlink_gb_s = 30\nnetwork_gb_s = 10\n"
)
MINE = f"[devices.mine]\n{NUMBERS}link_us = 9\nnetwork_us = 0\nnode = 4\n"


@pytest.mark.parametrize(("gpus", "sizes"), [(3, {1, 3}), (6, {1, 2, 3, 6}), (8, {1, 2, 4, 8})])
def test_a_search_tries_pipeline_sizes_that_divide_the_devices(
    gpus: int, sizes: set[int], tmp_path: Path
) -> None:
    _, args, _ = planned(tmp_path)
    config = config_from_hf(LLAMA_8B | {"num_hidden_layers": 24})
    subject = PlanInput(config=config, seq_length=512, model=ModelCounts.for_model(config))
    fits = fitting_layouts(subject, args, 24, gpus, load_hardware("gib:1000"))
    assert {fit.layout.pp for fit in fits} == sizes


def test_a_search_orders_layouts_without_simulating_their_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, args, _ = planned(tmp_path)
    rough, predict = [], search.predict_step_time

    def recorded(*given: Any, **options: Any) -> Any:
        rough.append(options.get("roughly"))
        return predict(*given, **options)

    monkeypatch.setattr(search, "predict_step_time", recorded)
    assert list(fitting_layouts(subject, args, 8, 2, load_hardware("gib:1000")))
    assert set(rough) == {True}


def test_a_search_tries_every_size_of_each_axis_that_a_model_and_its_devices_have() -> None:
    """Two experts and four layers on eight devices, of which four are a node."""
    moe = {"num_moe_experts": 2, "moe_ffn_hidden_size": 64, "moe_router_topk": 1}
    config = config_from_hf(LLAMA_8B).replace_fields(model_type="qwen3_moe", num_layers=4, **moe)

    def tried(seq_length: int) -> list[ParallelLayout]:
        subject: Any = SimpleNamespace(config=config, seq_length=seq_length)
        return list(_layouts(subject, 8, 4))

    found = tried(8192)
    sizes = {name: {getattr(each, name) for each in found} for name in ("tp", "pp", "cp", "ep", "vpp")}
    assert sizes == {"tp": {1, 2, 4}, "pp": {1, 2, 4}, "cp": {1, 2, 4, 8}, "ep": {1, 2}, "vpp": {1, 2}}
    assert {(each.tp, each.etp) for each in found} == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)}
    assert {(each.pp, each.vpp) for each in found} == {(1, 1), (2, 1), (2, 2), (4, 1)}
    assert {(each.tp, each.cp) for each in found if each.pp == 1} == {
        (tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8) if tp * cp <= 8
    }
    assert {each.cp for each in tried(8191)} == {1}


def test_a_search_keeps_the_samples_of_a_step() -> None:
    subject: Any = SimpleNamespace(config=config_from_hf(LLAMA_8B), seq_length=8192, runs_forward_alone=False)
    found = [
        (8 // layout.model_parallel_size)
        * keys["per_device_train_batch_size"]
        * keys["gradient_accumulation_steps"]
        for layout, keys in candidates(subject, 24, 8, 8, ({},))
    ]
    assert found and set(found) == {24}


@pytest.mark.parametrize(("layers", "uneven"), [(4, set()), (6, {(4, 1), (4, 2)}), (2, set())])
def test_a_search_counts_ends_as_layers_only_where_layers_do_not_divide(
    layers: int, uneven: set[tuple[int, int]]
) -> None:
    subject: Any = SimpleNamespace(
        config=config_from_hf(LLAMA_8B).replace_fields(num_layers=layers), seq_length=512
    )
    found = [each for each in _layouts(subject, 8, 4) if each.account_for_loss_in_pipeline_split]
    assert {(each.pp, each.vpp) for each in found} == uneven
    assert not uneven or {each.tp for each in found} == {1, 2}


def test_a_users_table_adds_a_device_or_changes_keys_of_one(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(MINE + "[devices.h100-80]\nnetwork_gb_s = 25\n[efficiency]\noverlapped = 0\n")
    assert load_hardware("mine", table).device.node == 4
    own, changed_one = load_hardware("h100-80"), load_hardware("h100-80", table)
    assert changed_one.device == replace(own.device, network_gb_s=25)
    assert changed_one.efficiency == replace(own.efficiency, overlapped=0)
    assert load_hardware("gib:40", table).device == replace(changed_one.device, name="gib:40", memory_gib=40)
    with pytest.raises(UsageError, match="expected h100-80, h200, b200, gb200, gb300, b300 or gib:N"):
        load_hardware("h1000")


@pytest.mark.parametrize("size", ["many", "inf", "-inf", "nan", "-40", "4", ""])
def test_a_device_of_no_size_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match=f"--device gib:{size}: expected a number of GiB above 4"):
        load_hardware(f"gib:{size}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices = 3", "devices = 3: expected a table"),
        ("efficiency = true", "efficiency = True: expected a table"),
        ("[devices]\nmine = 3", "devices.mine = 3: expected a table"),
        ("[efficency]\nmemory = 1", "the file has unknown keys: efficency; expected devices, efficiency"),
        ("[efficiency]\nlinks = 1", r"\[efficiency\] has unknown keys: links; expected attention, "),
        ("[devices.h200]\nname = 1", r"\[devices.h200\] has unknown keys: name; expected fp8_tflops, "),
        ("[devices.mine]\nmemory_gib = 30", r"\[devices.mine\] lacks the keys fp8_tflops, .*, tflops$"),
        ("[devices.h200]\ntflops = 0", "tflops = 0: expected a number above 0$"),
        ("[devices.h200]\ntflops = true", "tflops = True: expected a number above 0$"),
        ("[devices.h200]\ntflops = inf", "tflops = inf: expected a number above 0$"),
        ("[devices.h200]\nlink_gb_s = nan", "link_gb_s = nan: expected a number above 0$"),
        ("[devices.h200]\nlink_us = -1", "link_us = -1: expected a number of at least 0$"),
        ("[devices.h200]\nlink_us = '8'", "link_us = '8': expected a number of at least 0$"),
        ("[devices.h200]\nmemory_gib = 4", "memory_gib = 4: expected a number above 4$"),
        ("[devices.h200]\nfp8_transposed = 1", "fp8_transposed = 1: expected true or false$"),
        ("[devices.h200]\nnode = 0", "node = 0: expected a whole number of at least 1$"),
        ("[devices.h200]\nnode = 1.5", "node = 1.5: expected a whole number of at least 1$"),
        ("[efficiency]\nmemory = 2", "memory = 2: expected a number above 0 and at most 1$"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        load_hardware("h100-80", table)
    assert str(caught.value).startswith(f"--hardware {table}: ") and "\n" not in str(caught.value)


def test_the_plans_own_words_are_told_from_the_runs() -> None:
    parser = program().parser("plan")
    options, rest = parser.read_known(
        ["run.yaml", "--gpus", "8", "--max_steps", "3", "--dry-run", "--device=h200"]
    )
    assert (options.gpus, options.dry_run, options.device, rest) == (8, True, "h200", ["--max_steps", "3"])
    for words, said in [
        (["--gpus", "many"], "--gpus must be an integer, not 'many'"),
        (["--gpus", "0"], "expected at least 1"),
        (["--search"], "add --gpus N"),
        (["--search", "--gpus", "8", "--dry_run"], "--search excludes --dry_run and --plot"),
        (["--search", "--gpus", "8", "--plot", "pictures"], "--search excludes --dry_run and --plot"),
        (["--json=file"], "--json takes no value"),
        (["--images", "-1"], "--images -1: expected 0 or more"),
        (["--image_size", "big"], "--image_size must be an integer"),
    ]:
        with pytest.raises(UsageError, match=said):
            from_namespace(PlanOptions, parser.read_known(words)[0])


def test_an_image_of_one_pixel_is_the_smallest() -> None:
    assert PlanOptions(image_size=1).image_size == 1
    with pytest.raises(UsageError, match="--image_size 0: expected at least 1"):
        PlanOptions(image_size=0)
