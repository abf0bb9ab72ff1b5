"""What does not fit on a device, and which one change would make it fit."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.types import JsonObject
from mca_train.plan.hardware import Device
from mca_train.plan.memory import GIB, Plan, Subject, plan_of

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Remedy:
    """Keys to set, and what the fullest stage needs then, in bytes."""

    changes: JsonObject
    needs: int
    fits: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.changes.items())


def fullest(plan: Plan) -> int:
    """Bytes of the fullest stage."""
    return max(stage.total for stage in plan.stages)


def over(plan: Plan, device: Device) -> list[int]:
    """The pipeline stages that do not fit."""
    return [pp for pp, stage in enumerate(plan.stages) if stage.total > device.usable_gib * GIB]


def changed(training: "TrainingArguments", changes: JsonObject) -> "TrainingArguments":
    """The same arguments with others set; they are not checked again."""
    other = copy.copy(training)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def remedies(
    subject: Subject, training: "TrainingArguments", layout: ParallelLayout, world_size: int, device: Device
) -> list[Remedy]:
    """Return changes that fit, the cheapest first; if none does, those that save most. Steps stay as large."""
    found = []
    for changes in _candidates(subject, training, layout, world_size):
        sizes = {name: value for name, value in changes.items() if name in layout.__dataclass_fields__}
        try:
            other = replace(layout, **sizes)
            if other.tp > device.node or check_layout(subject.config, other, world_size, subject.seq_length):
                continue
            plan = plan_of(subject, changed(training, changes), other, world_size)
        except McaError:
            continue
        found.append(Remedy(changes, fullest(plan), not over(plan, device)))
    fitting = [remedy for remedy in found if remedy.fits]
    return fitting[:4] or sorted(found, key=lambda remedy: remedy.needs)[:2]


def _candidates(
    subject: Subject, training: "TrainingArguments", layout: ParallelLayout, world_size: int
) -> Iterator[JsonObject]:
    most = training.per_device_train_batch_size
    if subject.runs_forward_alone and training.per_device_eval_batch_size > most:
        yield {"per_device_eval_batch_size": most}
    adam = training.optimizer in (None, "adam")  # others are neither split nor offloaded
    divided: JsonObject = {}
    several = world_size > layout.tp * layout.pp  # ranks that hold the same parameters
    if adam and not training.use_distributed_optimizer and subject.adapter is None and several:
        divided = {"use_distributed_optimizer": True}
        yield divided
    if layout.tp > 1 and training.sequence_parallel is None:
        yield {"sequence_parallel": True}
    has_logits = subject.config.num_labels is None
    if has_logits and not training.loss_chunk_size and not subject.config.mtp_num_layers:
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
    yield from _larger(subject, training, layout)


def _larger(subject: Subject, training: "TrainingArguments", layout: ParallelLayout) -> Iterator[JsonObject]:
    if subject.config.num_moe_experts:
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
        replicas = tp * pp // (layout.tp * layout.pp)  # so many that now share a replica's samples
        changes: JsonObject = {"gradient_accumulation_steps": training.gradient_accumulation_steps * replicas}
        if tp != layout.tp:
            changes |= {"tensor_model_parallel_size": tp, "sequence_parallel": True}
        if pp != layout.pp:
            changes["pipeline_model_parallel_size"] = pp
        yield changes
        yield changes | FULL
