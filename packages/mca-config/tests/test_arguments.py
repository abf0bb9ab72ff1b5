"""The arguments without transformers: types, constraints, layouts, and Megatron's names."""

import logging
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mca_config import (
    DistributingParallelArguments,
    McaError,
    MegatronArguments,
    ParallelLayout,
    _megatron_keys,
)
from mca_config.arguments import _additional, distributing


def names_of(cls: Any) -> set[str]:
    return set(cls.__dataclass_fields__)


def test_every_argument_has_a_help_text() -> None:
    for field in MegatronArguments.__dataclass_fields__.values():
        text = field.metadata["help"]
        assert text.endswith(".") and "%" not in text, field.name


def test_every_argument_of_a_model_is_megatrons() -> None:
    ours = names_of(DistributingParallelArguments) - {"additional_configs"}
    assert ours <= names_of(MLATransformerConfig)


def test_overrides_carry_megatrons_names() -> None:
    args = MegatronArguments(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=1000,
        ddp_average_in_collective=False,
        accumulate_allreduce_grads_in_fp32=True,
        check_for_nan_in_grad=False,
        num_distributed_optimizer_instances=1,
        optimizer="adam",
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
        use_torch_optimizer_for_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        pin_cpu_grads=False,
        pin_cpu_params=True,
        use_precision_aware_optimizer=True,
        decoupled_lr=1e-4,
        decoupled_min_lr=1e-6,
        min_lr=1e-5,
        initial_loss_scale=2.0,
        min_loss_scale=1.0,
        loss_scale_window=10.0,
        hysteresis=2,
        moe_grouped_gemm=True,
        tensor_model_parallel_size=2,
        additional_configs={"batch_p2p_sync": False},
    )
    assert args.ddp_config_overrides().keys() <= names_of(DistributedDataParallelConfig)
    assert len(args.ddp_config_overrides()) == 8
    assert args.optimizer_config_overrides().keys() <= names_of(OptimizerConfig)
    assert len(args.optimizer_config_overrides()) == 17
    fixed = MegatronArguments(optimizer="sgd", sgd_momentum=0.5, loss_scale=1.0).optimizer_config_overrides()
    assert fixed == {"optimizer": "sgd", "sgd_momentum": 0.5, "loss_scale": 1.0}
    assert args.transformer_config_overrides() == {"moe_grouped_gemm": True, "batch_p2p_sync": False}


def test_nothing_asked_for_overrides_nothing() -> None:
    args = MegatronArguments()
    assert args.transformer_config_overrides() == {}
    assert args.ddp_config_overrides() == {}
    assert args.optimizer_config_overrides() == {}
    assert args.layout() == ParallelLayout()


def test_the_list_of_settable_names_is_that_of_the_installed_megatron() -> None:
    not_json = ("Callable", "torch.dtype", "ContextManager", "RecipeConfig", "InferenceCudaGraphScope")
    fields = MLATransformerConfig.__dataclass_fields__.values()
    expected = {field.name for field in fields if not any(word in str(field.type) for word in not_json)}
    settable = _additional.settable_keys()
    assert settable == expected, f"add {sorted(expected - settable)}, drop {sorted(settable - expected)}"
    elsewhere = _megatron_keys.ONLY_0_16 | _megatron_keys.ONLY_0_19
    assert _megatron_keys.ARCHITECTURE <= names_of(MLATransformerConfig) | elsewhere


def test_without_megatron_any_supported_name_is_settable(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert _additional.settable_keys() >= {"moe_extended_tp", "use_mup", "hidden_size"}


CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"overlap_param_gather": True},
        ["overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"],
    ),
    ({"overlap_param_gather": True, "overlap_grad_reduce": True}, ["needs use_distributed_optimizer;"]),
    (
        {"variable_seq_lengths": True, "moe_token_dispatcher_type": "allgather"},
        ["variable_seq_lengths excludes moe_token_dispatcher_type allgather", "alltoall"],
    ),
    (
        {"sequence_parallel": True, "tensor_model_parallel_size": 1},
        ["needs tensor_model_parallel_size of at least 2"],
    ),
    (
        {"sequence_parallel": False, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        ["sequence_parallel cannot be off", "expert_model_parallel_size to 1"],
    ),
    ({"sequence_parallel": True, "distribute_saved_activations": True}, ["excludes sequence_parallel"]),
    ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, ["overlap_p2p_comm excludes batch_p2p_comm"]),
    ({"recompute_granularity": "full"}, ["needs recompute_method", "recompute_num_layers"]),
    ({"recompute_granularity": "selective", "recompute_num_layers": 1}, ["needs recompute_granularity full"]),
    ({"recompute_method": "block"}, ["recompute_method needs recompute_granularity full"]),
    ({"recompute_modules": ["mlp"]}, ["recompute_modules needs recompute_granularity selective"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["mpl"]}, ["mpl is none of core_attn"]),
    ({"cpu_offloading": True, "pipeline_model_parallel_size": 2}, ["cpu_offloading excludes"]),
    ({"moe_pad_expert_input_to_capacity": True}, ["needs moe_expert_capacity_factor"]),
    (
        {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"},
        ["moe_expert_capacity_factor excludes"],
    ),
    (
        {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "allgather"},
        ["needs moe_token_dispatcher_type alltoall, not allgather"],
    ),
    (
        {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 1},
        ["overlap_moe_expert_parallel_comm excludes expert_model_parallel_size 1"],
    ),
    ({"cp_comm_type": "a2a+p2p"}, ["cp_comm_type", "'a2a+p2p'", "all_gather"]),
    ({"fp8_param": True}, ["fp8_param needs fp8"]),
    ({"fp8_recipe": "delayed"}, ["fp8_recipe needs fp8"]),
    ({"fp8": "e4m3", "transformer_impl": "local"}, ["fp8 needs transformer_impl transformer_engine"]),
    ({"moe_aux_loss_coeff": -1}, ["moe_aux_loss_coeff must be at least 0"]),
    ({"microbatch_group_size_per_vp_stage": 0}, ["must be at least 1"]),
    ({"attention_dropout": 1}, ["attention_dropout must be at least 0 and below 1"]),
    ({"moe_expert_capacity_factor": 0}, ["must be above 0"]),
    (
        {"ddp_average_in_collective": True, "calculate_per_token_loss": True},
        ["excludes calculate_per_token_loss"],
    ),
    ({"ddp_average_in_collective": True}, ["ddp_average_in_collective excludes calculate_per_token_loss"]),
    ({"calculate_per_token_loss": False}, ["calculate_per_token_loss cannot be false"]),
    ({"num_distributed_optimizer_instances": 2}, ["num_distributed_optimizer_instances 2 is not supported"]),
    ({"overlap_moe_expert_parallel_comm": True}, ["overlap_moe_expert_parallel_comm is not supported"]),
    ({"ddp_bucket_size": 100}, ["ddp_bucket_size needs overlap_grad_reduce"]),
    ({"optimizer": "sgd", "use_distributed_optimizer": True}, ["sgd excludes use_distributed_optimizer"]),
    ({"sgd_momentum": 0.5}, ["sgd_momentum needs optimizer sgd"]),
    ({"loss_scale": 2.0, "hysteresis": 3}, ["loss_scale is fixed, which excludes hysteresis"]),
    ({"distribute_saved_activations": True}, ["needs recompute_granularity full"]),
    ({"cpu_offloading_num_layers": 1}, ["cpu_offloading_num_layers needs cpu_offloading"]),
    ({"moe_token_drop_policy": "probs"}, ["moe_token_drop_policy needs moe_expert_capacity_factor"]),
    ({"cross_entropy_fusion_impl": "native"}, ["needs cross_entropy_loss_fusion"]),
    *(
        ({"transformer_impl": "local"} | given, [f"{words} needs transformer_impl transformer_engine"])
        for words, given in {
            "cpu_offloading": {"cpu_offloading": True},
            "moe_permute_fusion": {"moe_permute_fusion": True},
            "moe_router_fusion": {"moe_router_fusion": True},
            "apply_rope_fusion": {"apply_rope_fusion": True},
            "attention_backend flash": {"attention_backend": "flash"},
            "attention_backend unfused": {"attention_backend": "unfused"},
            "cross_entropy_fusion_impl te": {
                "cross_entropy_loss_fusion": True,
                "cross_entropy_fusion_impl": "te",
            },
        }.items()
    ),
    ({"ddp_bucket_size": 0}, ["ddp_bucket_size must be at least 1"]),
    ({"profile_step_start": 0}, ["profile_step_start is 0 and profile_step_end 12"]),
    ({"profile": True, "profile_step_end": 3}, ["profile_step_start is 10 and profile_step_end 3"]),
    ({"profile_ranks": [0]}, ["profile_ranks needs profile"]),
    ({"profile": True, "profile_ranks": [-1]}, [r"profile_ranks is [-1]; expected ranks from 0"]),
    ({"optimizer_offload_fraction": 0.5}, ["optimizer_offload_fraction needs optimizer_cpu_offload"]),
    ({"optimizer_offload_fraction": 2, "optimizer_cpu_offload": True}, ["must be between 0 and 1"]),
    ({"overlap_cpu_optimizer_d2h_h2d": True}, ["overlap_cpu_optimizer_d2h_h2d needs optimizer_cpu_offload"]),
    (
        {
            "optimizer_cpu_offload": True,
            "use_torch_optimizer_for_cpu_offload": False,
            "pin_cpu_params": False,
        },
        ["use_torch_optimizer_for_cpu_offload cannot be false", "pin_cpu_params cannot be false"],
    ),
    ({"optimizer_cpu_offload": True, "optimizer": "sgd"}, ["needs optimizer adam, not sgd"]),
    ({"optimizer": "muon", "use_distributed_optimizer": True}, ["muon excludes use_distributed_optimizer"]),
    ({"use_precision_aware_optimizer": True}, ["needs use_distributed_optimizer"]),
    ({"async_save": True}, ["async_save needs ckpt_format torch_dist"]),
    (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|tL"},
        ["has 3 stages", "pipeline_model_parallel_size 2"],
    ),
    (
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|t|t|tL",
            "virtual_pipeline_model_parallel_size": 4,
        },
        ["remove virtual_pipeline_model_parallel_size 4"],
    ),
    ({"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": 2}, ["of at least 2"]),
    ({"tensor_model_parallel_size": 0}, ["tensor_model_parallel_size must be an integer of at least 1"]),
    ({"tensor_model_parallel_size": "2"}, ["tensor_model_parallel_size must be an integer or null, not '2'"]),
    ({"moe_grouped_gemm": "yes"}, ["moe_grouped_gemm must be true or false or null"]),
    ({"fp8": "e5m2"}, ["fp8 must be 'e4m3' or 'hybrid'"]),
    ({"moe_aux_loss_coeff": "much"}, ["moe_aux_loss_coeff must be a number"]),
    ({"ckpt_format": "zip"}, ["ckpt_format must be 'mca' or 'torch_dist'"]),
]


@pytest.mark.parametrize(
    ("given", "words"), CONTRADICTIONS, ids=[" ".join(given) for given, _ in CONTRADICTIONS]
)
def test_a_contradiction_names_the_flags_and_the_remedy(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(McaError) as error:
        MegatronArguments(**given)
    assert all(word in str(error.value) for word in words), error.value


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(McaError, match="3 problems"):
        MegatronArguments(async_save=True, fp8_param=True, overlap_param_gather=True)


def test_what_goes_together_is_accepted() -> None:
    MegatronArguments(
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        ckpt_format="torch_dist",
    )
    DistributingParallelArguments(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=2, mtp_num_layers=0
    )


def test_a_number_that_yaml_left_a_string_is_read() -> None:
    assert MegatronArguments(min_lr="1e-5").min_lr == 1e-5


def test_tp_with_ep_turns_sequence_parallel_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    distributing._log_sequence_parallel_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            args = DistributingParallelArguments(tensor_model_parallel_size=2, expert_model_parallel_size=2)
            assert args.sequence_parallel is True
    assert len(caplog.records) == 1
    assert DistributingParallelArguments(tensor_model_parallel_size=2).sequence_parallel is None


def test_sequence_parallel_for_a_checkpoints_layout() -> None:
    both = ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert DistributingParallelArguments().sequence_parallel_for(both) is True
    assert DistributingParallelArguments().sequence_parallel_for(ParallelLayout()) is False
    with pytest.raises(McaError, match="sequence_parallel cannot be off"):
        DistributingParallelArguments(sequence_parallel=False).sequence_parallel_for(both)
    with pytest.raises(McaError, match="needs tensor_model_parallel_size"):
        DistributingParallelArguments(sequence_parallel=True).sequence_parallel_for(ParallelLayout())


BASE = ParallelLayout(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    pipeline_model_parallel_layout="Et|t|t|tL",
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=2,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        (
            {"tensor_model_parallel_size": 4},
            {"tensor_model_parallel_size": 4},
        ),
        ({"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 1}),
        (
            {"pipeline_model_parallel_size": 4},
            {
                "pipeline_model_parallel_size": 4,
                "pipeline_model_parallel_layout": None,
                "virtual_pipeline_model_parallel_size": None,
            },
        ),
        (
            {"virtual_pipeline_model_parallel_size": 3},
            {
                "pipeline_model_parallel_layout": None,
                "virtual_pipeline_model_parallel_size": 3,
            },
        ),
        ({"pipeline_model_parallel_size": 2}, {}),
    ],
)
def test_a_layout_is_filled_from_the_checkpoints(given: dict[str, Any], expected: dict[str, Any]) -> None:
    from dataclasses import replace

    args = DistributingParallelArguments(**given)
    assert args.layout(BASE) == replace(BASE, **expected)


def test_the_grid_of_the_arguments() -> None:
    args = DistributingParallelArguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert args.grid(8).data_parallel_size == 2
