"""Single changes that make a run fit on a device."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.types import JsonObject
from mca_train.plan.hardware import Device
from mca_train.plan.memory import GIB, Plan, PlanInput, plan_layout

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Remedy:
    """Keys to set, and the bytes of the fullest stage with them."""

    changes: JsonObject
    needs: int
    fits: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.changes.items())


def largest_stage(plan: Plan) -> int:
    """Return the bytes of the fullest stage."""
    return max(stage.total for stage in plan.stages)


def stages_over_limit(plan: Plan, device: Device) -> list[int]:
    """Return the pipeline stages that exceed the device's memory."""
    return [pp for pp, stage in enumerate(plan.stages) if stage.total > device.usable_gib * GIB]


def with_changes(training: "TrainingArguments", changes: JsonObject) -> "TrainingArguments":
    """Return a copy of the arguments with other values, which are not validated again."""
    other = copy.copy(training)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def find_remedies(
    plan_input: PlanInput,
    training: "TrainingArguments",
    layout: ParallelLayout,
    world_size: int,
    device: Device,
) -> list[Remedy]:
    """Return up to four changes that fit, or else the two that save most; the global batch stays the same."""
    found = []
    for changes in _candidates(plan_input, training, layout, world_size):
        sizes = {name: value for name, value in changes.items() if name in layout.__dataclass_fields__}
        try:
            other = replace(layout, **sizes)
            if other.tp > device.node or check_layout(
                plan_input.config, other, world_size, plan_input.seq_length
            ):
                continue
            plan = plan_layout(plan_input, with_changes(training, changes), other, world_size)
        except McaError:
            continue
        found.append(Remedy(changes, largest_stage(plan), not stages_over_limit(plan, device)))
    fitting = [remedy for remedy in found if remedy.fits]
    return fitting[:4] or sorted(found, key=lambda remedy: remedy.needs)[:2]


def _candidates(
    plan_input: PlanInput, training: "TrainingArguments", layout: ParallelLayout, world_size: int
) -> Iterator[JsonObject]:
    most = training.per_device_train_batch_size
    if plan_input.runs_forward_alone and training.per_device_eval_batch_size > most:
        yield {"per_device_eval_batch_size": most}
    adam = training.optimizer in (None, "adam")  # other optimizers are neither sharded nor offloaded
    divided: JsonObject = {}
    several = world_size > layout.tp * layout.pp  # ranks with the same parameters
    if adam and not training.use_distributed_optimizer and plan_input.adapter is None and several:
        divided = {"use_distributed_optimizer": True}
        yield divided
    if layout.tp > 1 and training.sequence_parallel is None:
        yield {"sequence_parallel": True}
    has_logits = plan_input.config.head.num_labels is None
    if has_logits and not training.loss_chunk_size and not plan_input.config.mtp_num_layers:
        yield {"loss_chunk_size": 1024}
    if training.per_device_train_batch_size > 1:
        accumulated = training.per_device_train_batch_size * training.gradient_accumulation_steps
        smaller: JsonObject = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulated}
        yield smaller
        if divided:
            yield divided | smaller
    if training.recompute_granularity is None:
        yield {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    if training.recompute_granularity != "full":
        yield FULL
    if adam and not training.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": True}
    yield from _larger(plan_input, training, layout)


def _larger(
    plan_input: PlanInput, training: "TrainingArguments", layout: ParallelLayout
) -> Iterator[JsonObject]:
    if plan_input.config.num_experts:
        yield {"expert_model_parallel_size": layout.ep * 2}
    for sizes in (
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "pp": 2},
        {"pp": 4},
        {"tp": 4, "pp": 2},
        {"tp": 8, "pp": 4},
    ):
        tp, pp = layout.tp * sizes.get("tp", 1), layout.pp * sizes.get("pp", 1)
        if layout.vpp > 1 and (training.microbatch_group_size_per_vp_stage or pp) < pp:
            continue
        replicas = tp * pp // (layout.tp * layout.pp)  # a new replica takes the samples of this many old ones
        changes: JsonObject = {"gradient_accumulation_steps": training.gradient_accumulation_steps * replicas}
        if tp != layout.tp:
            changes |= {"tensor_model_parallel_size": tp, "sequence_parallel": True}
        if pp != layout.pp:
            changes["pipeline_model_parallel_size"] = pp
        yield changes
        yield changes | FULL
