"""Every option that goes to Megatron is followed, refused, or without effect and said to be; none is forgotten."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import prepare_parent, run_ranks
from loss_curves import _BUILDERS
from mca_config import _megatron_keys as keys
from mca_config.arguments import DistributingParallelArguments, MegatronArguments, _additional
from mca_config.arguments import _additional as rules
from mca_config.errors import McaError
from mca_models.megatron import platform
from prediction import deepseek_with_prediction
from train_cases import arguments, samples, trained

pytestmark = pytest.mark.ranks

Changes = dict[str, Any]
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2}
CAPACITY = {"moe_expert_capacity_factor": 0.5}
SGD = {"optimizer": "sgd"}
RATES = {"decoupled_lr": 2e-3}

EFFECT: dict[str, tuple[str, Changes, Changes]] = {
    "moe_expert_capacity_factor": ("moe", {}, CAPACITY),
    "moe_token_drop_policy": ("moe", CAPACITY, {"moe_token_drop_policy": "position"}),
    "moe_input_jitter_eps": ("moe", {}, {"moe_input_jitter_eps": 0.2}),
    "moe_router_dtype": ("moe", {}, {"moe_router_dtype": "fp64"}),
    "moe_router_bias_update_rate": ("latent", {}, {"moe_router_bias_update_rate": 0.3}),
    "attention_dropout": ("dense", {}, {"attention_dropout": 0.2}),
    "hidden_dropout": ("dense", {}, {"hidden_dropout": 0.2}),
    "accumulate_allreduce_grads_in_fp32": (
        "dense",
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"accumulate_allreduce_grads_in_fp32": False},
    ),
    "optimizer": ("dense", {}, SGD),
    "sgd_momentum": ("dense", SGD, SGD | {"sgd_momentum": 0.9}),
    "min_lr": ("dense", {}, {"min_lr": 4e-3}),
    "decoupled_lr": ("dense", {}, RATES),
    "decoupled_min_lr": ("dense", RATES, RATES | {"decoupled_min_lr": 1e-3}),
}
"""Model, what is compared with, and what changes its numbers on one rank."""

BALANCED: Changes = {"additional_configs": {"moe_router_force_load_balancing": True}}
SETTINGS: Changes = BALANCED["additional_configs"] | {
    "batch_p2p_sync": False,
    "clone_scatter_output_in_embedding": False,
    "disable_bf16_reduced_precision_matmul": True,
    "disable_parameter_transpose_cache": True,
}
"""Settings of ``additional_configs`` that go with any layers."""

REACHES: dict[str, tuple[Changes, Any]] = {
    "microbatch_group_size_per_vp_stage": (VPP | {"gradient_accumulation_steps": 6}, 3),
    "attention_backend": ({}, "local"),
    "bias_activation_fusion": ({}, True),
    "bias_dropout_fusion": ({}, True),
    "cross_entropy_loss_fusion": ({}, True),
    "cross_entropy_fusion_impl": ({"cross_entropy_loss_fusion": True}, "native"),
    "variable_seq_lengths": (PP, True),
    "overlap_p2p_comm": (VPP, True),
    "batch_p2p_comm": (PP, False),
    "moe_shared_expert_overlap": ({}, True),
    "distribute_saved_activations": (
        TP | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        True,
    ),
    "cp_comm_type": ({"context_parallel_size": 2}, "all_gather"),
    "deterministic_mode": ({}, True),
}
"""What it needs beside it, and a value that must not change numbers but stand in Megatron's configuration."""

REFUSED: dict[str, tuple[str, Changes]] = {
    "cpu_offloading": ("needs transformer_impl", {"cpu_offloading": True}),
    "cpu_offloading_num_layers": ("needs cpu_offloading", {"cpu_offloading_num_layers": 1}),
    "moe_permute_fusion": ("needs transformer_impl", {"moe_permute_fusion": True}),
    "moe_router_fusion": ("needs transformer_impl", {"moe_router_fusion": True}),
    "overlap_moe_expert_parallel_comm": ("not supported", {"overlap_moe_expert_parallel_comm": True}),
    "transformer_impl": ("needs a GPU", {"transformer_impl": "transformer_engine"}),
    "masked_softmax_fusion": ("needs CUDA", {"masked_softmax_fusion": True}),
    "apply_rope_fusion": ("needs transformer_impl", {"apply_rope_fusion": True}),
    "gradient_accumulation_fusion": ("needs CUDA", {"gradient_accumulation_fusion": True}),
    "fp8": ("needs CUDA", {"fp8": "hybrid"}),
    "fp8_recipe": ("needs fp8", {"fp8_recipe": "delayed"}),
    "fp8_param": ("needs fp8", {"fp8_param": True}),
    "calculate_per_token_loss": ("cannot be false", {"calculate_per_token_loss": False}),
    "tp_comm_overlap": ("needs CUDA", {"tp_comm_overlap": True}),
    "num_distributed_optimizer_instances": ("not supported", {"num_distributed_optimizer_instances": 2}),
    "ddp_average_in_collective": ("excludes", {"ddp_average_in_collective": True}),
    "use_torch_optimizer_for_cpu_offload": (
        "cannot be false",
        {"optimizer_cpu_offload": True, "use_torch_optimizer_for_cpu_offload": False},
    ),
    "pin_cpu_params": ("cannot be false", {"optimizer_cpu_offload": True, "pin_cpu_params": False}),
}
"""What is said, and what of each is refused on a machine without a GPU."""

OFFLOAD = {"optimizer_cpu_offload": True}
SAID: dict[str, tuple[str, Changes]] = {
    "moe_grouped_gemm": ("the model has no experts", {"moe_grouped_gemm": True}),
    "attention_softmax_in_fp32": ("the local layers always do this", {"attention_softmax_in_fp32": False}),
    "pin_cpu_grads": ("no GPU", OFFLOAD | {"pin_cpu_grads": True}),
    "overlap_cpu_optimizer_d2h_h2d": ("no GPU", OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True}),
    "mtp_loss_scaling_factor": ("no MTP layers", {"mtp_loss_scaling_factor": 0.2}),
    "cp_comm_type": ("one context rank", {"cp_comm_type": "all_gather"}),
    "variable_seq_lengths": ("one pipeline stage", {"variable_seq_lengths": True}),
    "microbatch_group_size_per_vp_stage": (
        "no virtual pipeline stages",
        {"microbatch_group_size_per_vp_stage": 2},
    ),
    "moe_z_loss_coeff": ("the model has no experts", {"moe_z_loss_coeff": 0.1}),
    "deterministic_mode": ("no GPU", {"deterministic_mode": True}),
}
"""What is said of the dense model on one rank without a GPU."""

CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}
SELECTIVE = {"recompute_granularity": "selective"}
SAID_OF_VALUES: dict[str, tuple[str, Changes]] = {
    "warmup_steps": ("constant has no warm-up", {"lr_scheduler_type": "constant"}),
    "min_lr": ("constant has no end value", CONSTANT | {"min_lr": 1e-3}),
    "decoupled_min_lr": ("constant has no end value", CONSTANT | RATES | {"decoupled_min_lr": 1e-3}),
    "adam_beta1, adam_epsilon": ("the optimizer is sgd", SGD | {"adam_beta1": 0.5, "adam_epsilon": 1e-3}),
    "recompute_modules moe": ("the model has no experts", SELECTIVE | {"recompute_modules": ["mlp", "moe"]}),
}
"""What another argument, or the model, leaves nothing to do."""

SAID_OF_SETTINGS: dict[str, tuple[str, Changes]] = {
    name: (why, {"additional_configs": {name: True}})
    for name, why in {
        "moe_router_force_load_balancing": "the model has no experts",
        "batch_p2p_sync": "one pipeline stage",
        "clone_scatter_output_in_embedding": "no sequence parallelism",
    }.items()
}

ELSEWHERE: dict[str, str] = {
    "moe_pad_expert_input_to_capacity": "packages/mca-config/tests/test_arguments.py",
    "moe_router_load_balancing_type": "integration_tests/parity/test_train_moe.py",
    "moe_aux_loss_coeff": "integration_tests/parity/test_train_moe.py",
    "moe_z_loss_coeff": "integration_tests/parity/test_train_moe.py",
    "moe_token_dispatcher_type": "integration_tests/support/loss_curves.py",
    "mtp_num_layers": "integration_tests/parity/test_mtp.py",
    "mtp_loss_scaling_factor": "integration_tests/parity/test_mtp.py",
    "additional_configs": "packages/mca-config/tests/test_additional_configs.py",
    "sequence_packing": "integration_tests/parity/test_train_losses.py",
    "loss_chunk_size": "integration_tests/parity/test_train_losses.py",
    "peak_tflops": "integration_tests/training/test_run_monitoring.py",
    "freeze": "integration_tests/training/test_train_images.py",
    "vision_learning_rate": "integration_tests/training/test_train_images.py",
    "audio_learning_rate": "integration_tests/training/test_train_omni.py",
    "projector_learning_rate": "integration_tests/training/test_train_images.py",
    "profile": "packages/mca-train/tests/metrics/test_step_profile.py",
    "profile_step_start": "packages/mca-train/tests/metrics/test_step_profile.py",
    "profile_step_end": "packages/mca-train/tests/metrics/test_step_profile.py",
    "profile_ranks": "packages/mca-train/tests/metrics/test_step_profile.py",
    "ckpt_format": "integration_tests/checkpoints/test_train_resume.py",
    "async_save": "integration_tests/checkpoints/test_train_background.py",
    "save_hf_model": "integration_tests/checkpoints/test_train_resume.py",
    "overwrite_output_dir": "integration_tests/checkpoints/test_output_dir_reuse.py",
    "load_broadcast": "integration_tests/checkpoints/test_factory_loading.py",
    "optimizer_cpu_offload": "integration_tests/support/optimizer_states.py",
    "optimizer_offload_fraction": "integration_tests/training/test_train_offload.py",
    "overlap_cpu_optimizer_d2h_h2d": "integration_tests/training/test_train_offload.py",
    "use_precision_aware_optimizer": "integration_tests/support/optimizer_states.py",
    "use_distributed_optimizer": "integration_tests/support/loss_curves.py",
    "overlap_grad_reduce": "integration_tests/support/loss_curves.py",
    "overlap_param_gather": "integration_tests/support/loss_curves.py",
    "ddp_bucket_size": "integration_tests/support/loss_curves.py",
    "check_for_nan_in_grad": "integration_tests/training/test_train_options.py",
    "loss_scale": "integration_tests/training/test_train_loss_scale.py",
    "initial_loss_scale": "integration_tests/training/test_train_loss_scale.py",
    "hysteresis": "integration_tests/training/test_train_loss_scale.py",
    "min_loss_scale": "integration_tests/training/test_train_loss_scale.py",
    "loss_scale_window": "integration_tests/training/test_train_loss_scale.py",
    "recompute_granularity": "integration_tests/training/test_train_options.py",
    "recompute_method": "integration_tests/training/test_train_options.py",
    "recompute_num_layers": "integration_tests/training/test_train_options.py",
    "recompute_modules": "integration_tests/training/test_train_options.py",
    "sequence_parallel": "integration_tests/support/train_settings.py",
    "tensor_model_parallel_size": "integration_tests/support/train_settings.py",
    "pipeline_model_parallel_size": "integration_tests/support/train_settings.py",
    "virtual_pipeline_model_parallel_size": "integration_tests/support/train_settings.py",
    "context_parallel_size": "integration_tests/support/train_settings.py",
    "expert_model_parallel_size": "integration_tests/support/train_settings.py",
    "expert_tensor_parallel_size": "integration_tests/support/train_settings.py",
    "pipeline_model_parallel_layout": "integration_tests/support/loss_curves.py",
    "num_layers_in_first_pipeline_stage": "integration_tests/support/loss_curves.py",
    "num_layers_in_last_pipeline_stage": "integration_tests/parity/test_uneven_pipelines.py",
    "account_for_embedding_in_pipeline_split": "integration_tests/parity/test_uneven_pipelines.py",
    "account_for_loss_in_pipeline_split": "integration_tests/parity/test_uneven_pipelines.py",
}
"""Where it is tried on layouts on which it matters."""

FOLLOWED: dict[str, Any] = {
    "moe_router_force_biased": 1.0,
    "mtp_detach_heads": True,
    "mlp_chunks_for_training": 2,
}
"""What megatron-core 0.19 alone has and ``additional_configs`` lets through on the local layers."""


def test_no_option_is_forgotten() -> None:
    known = {field.name for field in dataclasses.fields(MegatronArguments)}
    assert {*EFFECT, *REACHES, *REFUSED, *SAID, *ELSEWHERE} == known
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parents[2] / file).read_text(), f"{file} no longer tries {name}"


def megatron(checkpoint: Path, output: Path, changes: Changes) -> tuple[Any, Any, Any]:
    """Arguments, the model's configuration and Megatron's, as a run is checked before anything is loaded."""
    prepare_parent()
    from dataclasses import replace

    from mca_models.megatron.factory.transformer_config import transformer_config
    from mca_train.config.model import model_config

    args, config = arguments(output, **changes), model_config(str(checkpoint))
    layout = args.layout(config.layout)
    return args, replace(config, layout=layout), transformer_config(config, args, layout, "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, build in _BUILDERS.items():
        build(folder / name)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, models, tmp_path):
    words, changes = REFUSED[name]
    with pytest.raises(McaError, match=f"{name}.*{words}"):
        megatron(models / ("moe" if name.startswith("moe") else "dense"), tmp_path, changes)


@pytest.mark.parametrize("name", REACHES)
def test_stands_in_megatrons_configuration(name, models, tmp_path):
    needed, value = REACHES[name]
    _, _, made = megatron(
        models / ("latent" if name.startswith("moe") else "dense"), tmp_path, needed | {name: value}
    )
    found = getattr(made, name)
    assert getattr(found, "name", found) == value


def test_additional_settings_stand_in_megatrons_configuration(models, tmp_path):
    _, _, made = megatron(models / "moe", tmp_path, {"additional_configs": SETTINGS})
    assert {name: getattr(made, name) for name in SETTINGS} == SETTINGS


def test_what_does_nothing_is_said_in_one_line(models, tmp_path, caplog):
    from mca_train.trainer.unused_options import warn_unused_options

    for name, (why, changes) in (SAID | SAID_OF_VALUES | SAID_OF_SETTINGS).items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="mca_train"):
            warn_unused_options(*megatron(models / "dense", tmp_path, changes))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("without effect in this run: "), line
        assert f"{name} (" in line and why in line, line
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mca_train"):
        warn_unused_options(*megatron(models / "dense", tmp_path, RATES), trains_vocabulary=False)
    assert caplog.messages == [
        "without effect in this run: decoupled_lr (embedding and output layer are not trained)"
    ]


def test_nothing_is_said_of_what_has_an_effect(models, tmp_path, caplog):
    from mca_train.trainer.unused_options import warn_unused_options

    for model, base, changes in EFFECT.values():
        with caplog.at_level(logging.WARNING, logger="mca_train"):
            warn_unused_options(*megatron(models / model, tmp_path, base | changes))
    assert not caplog.records


def test_routing_for_measuring_speed_is_said(models, tmp_path, caplog):
    from mca_train.trainer.unused_options import warn_forced_routing

    forced = {"additional_configs": {"moe_router_force_load_balancing": True}}
    for model, changes in (("moe", {}), ("dense", forced), ("moe", forced)):
        assert not caplog.records
        with caplog.at_level(logging.WARNING, logger="mca_train"):
            warn_forced_routing(*megatron(models / model, tmp_path, changes)[1:])
    assert [message.split(":")[0] for message in caplog.messages] == ["moe_router_force_load_balancing"]


def without_effect(models: Path, output: Path) -> tuple[list[str], bool]:
    """Options of `EFFECT` that change no parameter and no loss in two steps; whether log-probabilities are steady."""
    plain: dict[str, Any] = {}
    same = []
    for name, (model, base, changes) in (EFFECT | {"balanced": ("moe", {}, BALANCED)}).items():
        key = f"{model} {base}"
        if key not in plain:
            plain[key] = numbers(models / model, output, base)
        if numbers(models / model, output, base | changes) == plain[key]:
            same.append(name)
    return same, is_steady(models / EFFECT["moe_input_jitter_eps"][0], output, moe_input_jitter_eps=0.2)


def is_steady(checkpoint: Path, output: Path, **changes: Any) -> bool:
    """Return True if log-probabilities are the same twice."""
    from mca_models import AutoModel

    model = AutoModel.from_pretrained(checkpoint, arguments(output, **changes))
    once, again = (model.log_probs(torch.arange(12)[None]).log_probs for _ in range(2))
    return torch.equal(once, again)


def numbers(checkpoint: Path, output: Path, changes: Changes) -> list[Any]:
    parameters, logged = trained(checkpoint, output, **{"gradient_accumulation_steps": 1} | changes)
    sums = [float(tensor.double().abs().sum()) for tensor in parameters.values()]
    return [sums, logged["loss"], logged["grad_norm"]]


def test_options_that_change_numbers_change_them(models, tmp_path):
    assert run_ranks(1, without_effect, models, tmp_path, timeout=240) == [([], True)]


def test_what_is_off_without_being_set_may_be_set_off():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    own = {field.name for field in dataclasses.fields(MegatronArguments)}
    off = {}
    for field in dataclasses.fields(MLATransformerConfig):
        name = field.name
        if name not in _additional.settable_keys() - keys.ARCHITECTURE - own:
            continue
        is_detail = any(rules._matches(name, names) for names in rules._DETAILS.values())
        if rules.unsupported_reason(name) == rules._UNTRIED or (
            is_detail and not rules.unsupported_reason(name)
        ):
            if rules.is_off(name, False):
                assert field.default in (None, False, 0), name
                off[name] = False
    off |= {"qk_clip": False, "moe_deepep_num_sms": None}
    found = DistributingParallelArguments(additional_configs=off).transformer_config_overrides()
    assert not any(found.values())
    assert "moe_enable_deepep" in found and not {"qk_clip", "moe_deepep_num_sms"} & found.keys()


def test_settings_of_the_newest_megatron_are_refused_by_name(models, tmp_path, monkeypatch):
    monkeypatch.setattr(_additional, "settable_keys", lambda: keys.COMMON | keys.ONLY_0_19)
    taken = []
    for name in keys.ONLY_0_19 - FOLLOWED.keys():
        try:
            megatron(models / "moe", tmp_path, {"additional_configs": {name: 2}})
            taken.append(name)
        except McaError as error:
            assert name in str(error) and "\n" not in str(error), error
    assert not taken
    with pytest.raises(McaError, match="mlp_chunks_for_training balances"):
        megatron(models / "moe", tmp_path, {"additional_configs": {"mlp_chunks_for_training": 2}})


def with_and_without(models: Path, output: Path) -> dict[str, list[Any]]:
    """Parameters after a step of sgd, without and with each of ``FOLLOWED``, and without MTP layers."""
    step: Changes = SGD | {"max_steps": 1, "max_grad_norm": 0.0, "train_dataset": samples(4, vocab=64)}
    names = {"moe_router_force_biased": "moe", "mtp_detach_heads": "predicting"}
    found = {}
    for name, value in FOLLOWED.items():
        added: list[Changes] = [{}, {"additional_configs": {name: value}}, {"mtp_num_layers": 0}]
        checkpoint = models / names.get(name, "dense")
        found[name] = [trained(checkpoint, output, **(step | changes))[0] for changes in added]
    return found


@pytest.mark.skipif(platform.megatron_version() < (0, 19), reason="megatron-core 0.16 has none of them")
def test_settings_of_the_newest_megatron_are_followed(models, tmp_path):
    deepseek_with_prediction().save(models / "predicting")
    (found,) = run_ranks(1, with_and_without, models, tmp_path)

    def differ(name: str, *, one: int, other: int) -> set[str]:
        both = found[name][one], found[name][other]
        return {key for key in both[0].keys() & both[1].keys() if worst_of(both[0][key], both[1][key]) > 1e-6}

    assert differ("moe_router_force_biased", one=0, other=1)
    assert not differ("mlp_chunks_for_training", one=0, other=1)
    attached = differ("mtp_detach_heads", one=0, other=2)
    assert attached and not attached & differ("mtp_detach_heads", one=1, other=2)
    assert all(not name.startswith("mtp.") for name in differ("mtp_detach_heads", one=0, other=1))


def worst_of(one: Any, other: Any) -> float:
    return float((one - other).abs().max())
