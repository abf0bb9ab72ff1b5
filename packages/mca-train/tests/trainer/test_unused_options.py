"""Options without effect, each with its reason, for a model and a layout that lack what they change."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_utils import SchedulerType

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout
from mca_train.trainer import unused_options
from mca_train.trainer.unused_options import (
    _groups,
    _is_set,
    _values,
    warn_forced_routing,
    warn_unused_options,
)

DENSE: Any = {"moe": None}
MEGATRON = {
    "mtp_num_layers": 1,
    "sequence_parallel": True,
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "fp16": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": 0.1,
}
EVERYTHING = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
}


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_options.platform, "device_type", lambda: "cuda")


def reasons(megatron: dict[str, Any] | None = None, *, moe: Any = "experts", **sizes: Any) -> dict[str, Any]:
    """Return the options without effect by reason; by default each has one."""
    experts = SimpleNamespace(moe_shared_expert_intermediate_size=8) if moe == "experts" else moe
    config: Any = SimpleNamespace(moe=experts, layout=ParallelLayout(**(EVERYTHING | sizes)))
    args: Any = SimpleNamespace(
        moe_router_bias_update_rate=0.1, transformer_config_overrides=lambda: {"moe_z_loss_coeff": 1, "x": 2}
    )
    made: Any = SimpleNamespace(**(MEGATRON | (megatron or {})))
    return dict(_groups(args, config, made))


PIPELINE = (
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "variable_seq_lengths",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "batch_p2p_sync",
    "deallocate_pipeline_outputs",
)


@pytest.mark.parametrize(
    ("changes", "reason", "options"),
    [
        ({"mtp_num_layers": None}, "no MTP layers", ("mtp_loss_scaling_factor", "mtp_detach_heads")),
        ({"mtp_num_layers": 0}, "no MTP layers", ("mtp_loss_scaling_factor", "mtp_detach_heads")),
        ({"sequence_parallel": False}, "no sequence parallelism", ("clone_scatter_output_in_embedding",)),
        ({"transformer_impl": "local"}, "the local layers always do this", ("attention_softmax_in_fp32",)),
        ({"bf16": False}, "gradients of fp32 weights are fp32", ("accumulate_allreduce_grads_in_fp32",)),
        ({"bf16": False, "fp16": True}, None, ()),
        (
            {"moe_router_enable_expert_bias": False},
            "the router has no expert bias",
            ("moe_router_bias_update_rate",),
        ),
        (
            {"moe_router_bias_update_rate": 0.0},
            "an adapter, or freeze, keeps expert biases fixed",
            ("moe_router_bias_update_rate",),
        ),
        (
            {"moe_router_load_balancing_type": ["none"]},
            "moe_router_load_balancing_type is none",
            ("moe_aux_loss_coeff",),
        ),
    ],
)
def test_what_a_model_lacks_has_options_without_effect(
    changes: dict[str, Any], reason: str | None, options: tuple[str, ...]
) -> None:
    assert reasons() == {}
    assert reasons(changes) == ({} if reason is None else {reason: options})


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (
            {"virtual_pipeline_model_parallel_size": None},
            {"no virtual pipeline stages": ("microbatch_group_size_per_vp_stage",)},
        ),
        (
            {"virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_size": 1},
            {
                "no virtual pipeline stages": ("microbatch_group_size_per_vp_stage",),
                "one pipeline stage": PIPELINE,
            },
        ),
        ({"context_parallel_size": 1}, {"one context rank": ("cp_comm_type",)}),
        ({"tensor_model_parallel_size": 1}, {"one tensor rank": ("distribute_saved_activations",)}),
    ],
)
def test_what_a_layout_lacks_has_options_without_effect(sizes: dict[str, Any], found: dict[str, Any]) -> None:
    assert reasons(**sizes) == found


@pytest.mark.parametrize(("etp", "is_named"), [(None, False), (2, False), (1, True)])
def test_a_dense_model_has_no_options_of_experts(etp: int | None, is_named: bool) -> None:
    options = reasons(moe=None, expert_tensor_parallel_size=etp)
    names = ("moe_router_bias_update_rate", "moe_z_loss_coeff")
    assert options == {
        "the model has no experts": (*names, *(["expert_tensor_parallel_size"] if is_named else []))
    }
    shared = SimpleNamespace(moe_shared_expert_intermediate_size=0)
    assert reasons(moe=shared) == {"the model has no shared experts": ("moe_shared_expert_overlap",)}


def test_a_machine_without_a_gpu_has_options_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_options.platform, "device_type", lambda: "cpu")
    names = ("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "deterministic_mode")
    assert reasons() == {"there is no GPU": names}


def values(moe: Any = None, coefficient: float = 0.0, **changes: Any) -> list[tuple[str, tuple[str, ...]]]:
    plain = {"lr_scheduler_type": SchedulerType.LINEAR, "warmup_steps": 0, "min_lr": 0.0}
    plain |= {"decoupled_min_lr": None, "optimizer": None, "recompute_modules": None}
    plain |= {"moe_aux_loss_coeff": None, "moe_router_load_balancing_type": None}
    args: Any = SimpleNamespace(**(plain | changes))
    config: Any = SimpleNamespace(moe=moe)
    found = _values(args, config, SimpleNamespace(moe_aux_loss_coeff=coefficient))  # type: ignore[arg-type]
    return [(why, names) for why, names in found if names]


SHARED = SimpleNamespace(moe_shared_expert_intermediate_size=8)
ROUTED = SimpleNamespace(moe_shared_expert_intermediate_size=0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"warmup_steps": 3}, []),
        (
            {"warmup_steps": 3, "lr_scheduler_type": SchedulerType.CONSTANT},
            [("lr_scheduler_type constant has no warm-up", ("warmup_steps",))],
        ),
        ({"lr_scheduler_type": SchedulerType.CONSTANT}, []),
        (
            {"min_lr": 0.1, "decoupled_min_lr": 0.2, "lr_scheduler_type": SchedulerType.CONSTANT_WITH_WARMUP},
            [("lr_scheduler_type constant_with_warmup has no end value", ("min_lr", "decoupled_min_lr"))],
        ),
        ({"min_lr": 0.1}, []),
        ({"recompute_modules": ["core_attn"]}, []),
        (
            {"recompute_modules": ["moe", "core_attn", "moe_act"]},
            [("the model has no experts", ("recompute_modules moe", "recompute_modules moe_act"))],
        ),
        ({"recompute_modules": ["shared_experts"], "moe": SHARED}, []),
        ({"recompute_modules": ["moe"], "moe": ROUTED}, []),
        (
            {"recompute_modules": ["shared_experts"], "moe": ROUTED},
            [("the model has no shared experts", ("recompute_modules shared_experts",))],
        ),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe": ROUTED}, []),
        ({"moe_router_load_balancing_type": "aux_loss"}, []),
        ({"moe_router_load_balancing_type": "aux_loss", "moe": ROUTED, "coefficient": 0.1}, []),
        ({"moe_router_load_balancing_type": "aux_loss", "moe": ROUTED, "moe_aux_loss_coeff": 0.0}, []),
    ],
)
def test_values_that_another_option_disables(changes: dict[str, Any], found: list[Any]) -> None:
    assert values(**changes) == found


def test_sgd_has_no_moments(tmp_path: Any) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        optimizer="sgd",
        adam_beta2=0.5,
        adam_epsilon=1e-8,
    )
    config: Any = SimpleNamespace(moe=None)
    megatron: Any = SimpleNamespace()
    found = [(why, names) for why, names in _values(args, config, megatron) if names]
    assert found == [("the optimizer is sgd", ("adam_beta2",))]


@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("option", None, False),
        ("option", False, False),
        ("option", True, True),
        ("option", 0, True),
        ("option", "x", True),
        ("attention_softmax_in_fp32", True, False),
        ("attention_softmax_in_fp32", False, True),
    ],
)
@pytest.mark.parametrize("is_override", [False, True])
def test_an_option_counts_if_it_is_not_what_is_done_anyway(
    name: str, value: Any, is_set: bool, is_override: bool
) -> None:
    overrides = {name: value} if is_override else {}
    args: Any = SimpleNamespace(
        transformer_config_overrides=lambda: overrides, **({} if is_override else {name: value})
    )
    assert _is_set(args, name) is is_set


def test_options_are_listed_once_by_reason(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    groups = [("a reason", ("one", "two")), ("another", ("three",)), ("a third", ("four",))]
    monkeypatch.setattr(unused_options, "_groups", lambda *_: groups)
    monkeypatch.setattr(unused_options, "_values", lambda *_: [("a reason", ("five x",)), ("empty", ())])
    monkeypatch.setattr(
        unused_options,
        "_is_set",
        lambda args, name: name in ("two", "four", "decoupled_lr", "moe_router_bias_update_rate"),
    )
    megatron: Any = SimpleNamespace(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.1)
    config: Any = None
    args: Any = None
    warn_unused_options(args, config, megatron)
    warn_unused_options(args, config, megatron, trains_vocabulary=False, trains_routers=False)
    first, second = (each.removeprefix("without effect in this run: ") for each in caplog.messages)
    assert first == "two, five x (a reason); four (a third)"
    assert second == (
        "two, five x (a reason); four (a third); decoupled_lr (embedding and output layer are not trained); "
        "moe_router_bias_update_rate (routers are frozen, including expert biases)"
    )
    assert unused_options.unused_option_names(args, config, megatron) == {"one", "two", "three", "four"}
    caplog.clear()
    megatron.moe_router_bias_update_rate = 0.0
    warn_unused_options(args, config, megatron, trains_routers=False)
    assert caplog.messages[0].endswith("four (a third)")


@pytest.mark.parametrize(
    ("forced", "moe", "is_reported"), [(True, "moe", True), (None, "moe", False), (True, None, False)]
)
def test_experts_chosen_at_random_are_reported(
    forced: bool | None, moe: str | None, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    megatron: Any = SimpleNamespace(moe_router_force_load_balancing=forced)
    warn_forced_routing(SimpleNamespace(moe=moe), megatron)  # type: ignore[arg-type]
    assert [each.startswith("moe_router_force_load_balancing: experts") for each in caplog.messages] == [
        True
    ] * is_reported
