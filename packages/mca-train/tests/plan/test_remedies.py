"""Changes that make a run fit: each is offered where it helps, and only there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout
from mca_models.templates import config_from_hf
from mca_train.plan.counts import ModelCounts
from mca_train.plan.hardware import load_hardware
from mca_train.plan.memory import GIB, Plan, PlanInput, plan_layout
from mca_train.plan.search import (
    FULL,
    Remedy,
    _remedies,
    find_remedies,
    largest_stage,
    stages_over_limit,
    with_changes,
)

SPLIT = {"use_distributed_optimizer": True}
SEQUENCES = {"sequence_parallel": True}
CHUNKS = {"loss_chunk_size": 1024}
SMALLER = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
OFFLOAD = {"optimizer_cpu_offload": True}
EVALUATION = {"per_device_eval_batch_size": 4}
SINGLE_CHANGES = [SPLIT, SEQUENCES, CHUNKS, SMALLER, SPLIT | SMALLER, SELECTIVE, FULL, OFFLOAD]
TRAINING = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 5,
    "gradient_accumulation_steps": 2,
    "optimizer": "adam",
    "use_distributed_optimizer": None,
    "sequence_parallel": None,
    "loss_chunk_size": None,
    "recompute_granularity": None,
    "optimizer_cpu_offload": False,
    "microbatch_group_size_per_vp_stage": None,
}


def offered(*, tp: int = 2, pp: int = 1, world: int = 8, **changes: Any) -> list[dict[str, Any]]:
    """Return the changes for a run that differs by ``changes``."""
    config = {"num_experts": None, "mtp_num_layers": 0, "head": SimpleNamespace(num_labels=None)}
    plan_input = {"adapter": None, "runs_forward_alone": False}
    for given in (plan_input, config):
        given |= {name: changes.pop(name) for name in list(changes) if name in given}
    subject: Any = SimpleNamespace(**plan_input, config=SimpleNamespace(**config))
    training: Any = SimpleNamespace(**TRAINING | changes)
    layout = ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return list(_remedies(subject, training, layout, world))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SINGLE_CHANGES),
        ({"optimizer": None}, SINGLE_CHANGES),
        ({"optimizer": "sgd"}, [SEQUENCES, CHUNKS, SMALLER, SELECTIVE, FULL]),
        ({"use_distributed_optimizer": True}, [SEQUENCES, CHUNKS, SMALLER, SELECTIVE, FULL, OFFLOAD]),
        ({"adapter": object()}, [SEQUENCES, CHUNKS, SMALLER, SELECTIVE, FULL, OFFLOAD]),
        ({"world": 2}, [SEQUENCES, CHUNKS, SMALLER, SELECTIVE, FULL, OFFLOAD]),
        ({"pp": 4}, [SEQUENCES, CHUNKS, SMALLER, SELECTIVE, FULL, OFFLOAD]),
        ({"world": 4}, SINGLE_CHANGES),
        ({"tp": 1}, [one for one in SINGLE_CHANGES if one != SEQUENCES]),
        ({"sequence_parallel": False}, [one for one in SINGLE_CHANGES if one != SEQUENCES]),
        ({"loss_chunk_size": 512}, [one for one in SINGLE_CHANGES if one != CHUNKS]),
        ({"mtp_num_layers": 1}, [one for one in SINGLE_CHANGES if one != CHUNKS]),
        ({"head": SimpleNamespace(num_labels=3)}, [one for one in SINGLE_CHANGES if one != CHUNKS]),
        ({"per_device_train_batch_size": 1}, [SPLIT, SEQUENCES, CHUNKS, SELECTIVE, FULL, OFFLOAD]),
        ({"recompute_granularity": "selective"}, [one for one in SINGLE_CHANGES if one != SELECTIVE]),
        ({"recompute_granularity": "full"}, [one for one in SINGLE_CHANGES if one not in (SELECTIVE, FULL)]),
        ({"optimizer_cpu_offload": True}, SINGLE_CHANGES[:-1]),
        ({"runs_forward_alone": True}, [EVALUATION, *SINGLE_CHANGES]),
        ({"runs_forward_alone": True, "per_device_eval_batch_size": 4}, SINGLE_CHANGES),
    ],
)
def test_a_change_is_offered_where_it_can_save_memory(
    changes: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert offered(**changes)[:-12] == expected


def test_larger_layouts_accumulate_the_samples_of_the_replicas_they_replace() -> None:
    sizes = [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 4, 4), (4, 2, 8), (8, 4, 32)]
    expected: list[dict[str, Any]] = []
    for tp, pp, replicas in sizes:
        changes: dict[str, Any] = {"gradient_accumulation_steps": 2 * replicas}
        if tp > 1:
            changes |= {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
        if pp > 1:
            changes |= {"pipeline_model_parallel_size": 3 * pp}
        expected += [changes, changes | FULL]
    found = offered(tp=2, pp=3, world=6)
    assert found[-12:] == expected and {"expert_model_parallel_size": 2} not in found
    assert offered(tp=2, pp=3, world=6, num_experts=8)[-13:] == [{"expert_model_parallel_size": 2}, *expected]


def planned(tmp_path: Path, **changes: Any) -> tuple[PlanInput, TrainingArguments, Plan]:
    """Plan a small model on two ranks, of whose vocabulary the logits need most."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 65536}
    more = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 4096}
    config = config_from_hf(sizes | more)
    keys = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(**keys | {"per_device_train_batch_size": 4} | changes)
    subject = PlanInput(config=config, seq_length=4096, model=ModelCounts.for_model(config))
    return subject, args, plan_layout(subject, args, ParallelLayout(), 2)


def test_the_first_four_changes_that_fit_are_named_or_the_two_that_save_most(tmp_path: Path) -> None:
    subject, args, plan = planned(tmp_path)
    device = load_hardware("gib:80").device
    everything = find_remedies(subject, args, plan.layout, 2, device)
    smaller = SMALLER | {"gradient_accumulation_steps": 4}
    assert [remedy.changes for remedy in everything] == [SPLIT, CHUNKS, smaller, SPLIT | smaller]
    assert all(remedy.fits for remedy in everything)
    nothing = find_remedies(subject, args, plan.layout, 2, load_hardware("gib:4.01").device)
    needs = {}
    for changes in _remedies(subject, args, plan.layout, 2):
        layout = with_changes(args, changes).layout(plan.layout)
        if layout.model_parallel_size <= 2:
            again = plan_layout(subject, with_changes(args, changes), layout, 2)
            needs[str(changes)] = largest_stage(again)
    assert [remedy.needs for remedy in nothing] == sorted(needs.values())[:2]
    assert [needs[str(remedy.changes)] for remedy in nothing] == [remedy.needs for remedy in nothing]
    assert not any(remedy.fits for remedy in nothing)


def test_tensor_ranks_stay_within_a_node(tmp_path: Path) -> None:
    subject, args, plan = planned(tmp_path, per_device_train_batch_size=1)
    device = load_hardware("gib:4.01").device
    wide = {"gradient_accumulation_steps": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert wide | FULL in [one.changes for one in find_remedies(subject, args, plan.layout, 2, device)]
    found = find_remedies(subject, args, plan.layout, 2, replace(device, node=1))
    assert found and not any("tensor_model_parallel_size" in one.changes for one in found)


def test_a_stage_may_fill_a_device_to_the_last_byte(tmp_path: Path) -> None:
    _, _, plan = planned(tmp_path)
    device = load_hardware("gib:80").device
    held = plan.stages[0].total
    stages = tuple(replace(plan.stages[0], weights=plan.stages[0].weights + more) for more in (0, 1, 0))
    plan, full = replace(plan, stages=stages), replace(device, memory_gib=4 + held / GIB)
    assert stages_over_limit(plan, full) == [1] and largest_stage(plan) == held + 1


def test_a_remedy_is_the_keys_of_a_file_and_leaves_the_arguments_as_they_are(tmp_path: Path) -> None:
    assert str(Remedy(SPLIT | SMALLER, 1, True)) == (
        "use_distributed_optimizer: True, per_device_train_batch_size: 1, gradient_accumulation_steps: 8"
    )
    _, args, _ = planned(tmp_path)
    assert with_changes(args, SMALLER).per_device_train_batch_size == 1
    assert args.per_device_train_batch_size == 4
