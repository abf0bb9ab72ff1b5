"""Message about a search in which no layout fits the memory, with changes that make one fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout
from mca_config.printable import counted
from mca_train.plan.hardware import Hardware
from mca_train.plan.memory import GIB, PlanInput, minimum_memory, plan_layout
from mca_train.plan.search import FULL, candidates, stages_over_limit, with_changes

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

LORA_RANK = 16
_MOST_DEVICES = 64
"""Largest multiple of the devices that is tried."""
_SHORTEST = 128
"""Smallest ``seq_length`` that is tried."""


def explain_shortage(
    plan_input: PlanInput,
    training: "TrainingArguments",
    batch: int,
    gpus: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool],
    adapted: PlanInput | None,
) -> str:
    """Return why no layout fits, and the changes with which one does.

    Args:
        plan_input: Input of the plans.
        training: Training arguments of the search.
        batch: Samples of a step.
        gpus: Number of devices.
        hardware: Device and its efficiencies.
        allowed: Function that returns False for layouts that the run does not support.
        adapted: Input of the plans with an adapter of rank `LORA_RANK`; None: the run cannot train one.
    """
    least = min(
        (need for _, need in _layouts(plan_input, training, batch, gpus, hardware, allowed)), default=None
    )
    if least is None:
        return (
            f"no layout divides the model and {counted(batch, 'sample')} a step over {counted(gpus, 'device')}; change "
            "gradient_accumulation_steps or --gpus"
        )

    usable = hardware.device.usable_gib

    def fits(changed: PlanInput, args: "TrainingArguments", times: int = 1) -> bool:
        found = _layouts(changed, args, batch * times, gpus * times, hardware, allowed)
        return any(need <= usable * GIB and has_room() for has_room, need in found)

    too_large = least > usable * GIB
    alone = "alone need" if too_large else "need"
    reason = (
        f"weights, gradients and optimizer {alone} {least / GIB:.1f} GiB of each of {counted(gpus, 'device')} "
        f"({usable:.1f} usable)"
    )
    changes = []
    more = (1 << power for power in range(1, _MOST_DEVICES.bit_length()))
    if times := next((times for times in more if fits(plan_input, training, times)), None):
        changes.append(f"take {gpus * times} devices")
    if not too_large:
        reason += ", the activations do not fit in the rest"
        lengths = _halved(plan_input)
        if length := next((one.seq_length for one in lengths if fits(one, training)), None):
            changes.append(f"set seq_length: {length}")
    offloaded = with_changes(training, {"optimizer_cpu_offload": True})
    if (
        not training.optimizer_cpu_offload
        and training.optimizer in (None, "adam")
        and fits(plan_input, offloaded)
    ):
        changes.append("set optimizer_cpu_offload: true")
    if adapted is not None and fits(adapted, training):
        changes.append(f"train an adapter (lora_rank: {LORA_RANK})")
    return f"no layout fits: {reason}; {_alternatives(changes) or 'take larger devices or a smaller model'}"


def _alternatives(changes: list[str]) -> str:
    return ", or ".join(filter(None, [", ".join(changes[:-1]), *changes[-1:]]))


def _halved(plan_input: PlanInput) -> Iterator[PlanInput]:
    """Yield ``plan_input`` with shorter and shorter sequences; none with media, whose tokens are part of them."""
    length = plan_input.seq_length // 2
    while plan_input.media is None and length >= _SHORTEST:
        yield replace(plan_input, seq_length=length)
        length //= 2


def _layouts(
    plan_input: PlanInput,
    training: "TrainingArguments",
    batch: int,
    gpus: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool],
) -> Iterator[tuple[Callable[[], bool], int]]:
    """Yield for each layout with the smallest activations if it fits, as a function, and its bytes without them."""
    for layout, keys in candidates(plan_input, batch, gpus, hardware.device.node, (FULL,)):
        if layout.vpp > 1 or keys["per_device_train_batch_size"] != 1 or not allowed(layout):
            continue
        args = with_changes(training, keys)

        def fits(args: "TrainingArguments" = args, layout: ParallelLayout = layout) -> bool:
            return not stages_over_limit(plan_layout(plan_input, args, layout, gpus), hardware.device)

        yield fits, minimum_memory(plan_input, args, layout, gpus)
