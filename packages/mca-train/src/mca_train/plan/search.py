"""Changes of a run that make it fit: single ones (`Remedy`), and the fastest layouts on a number of devices.

If no layout fits the memory, `explain_shortage` says why, and names changes with which one does.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import SIZE_FIELDS, ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.templates.parts.moe import expert_sizes
from mca_train.config.model import batch_unit
from mca_train.plan.counts import optimizer_shards
from mca_train.plan.hardware import Device, Hardware
from mca_train.plan.memory import GIB, Plan, PlanInput, chunk_spec, minimum_memory, plan_layout
from mca_train.plan.speed import StepTime, StepTimeModel

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LORA_RANK = 16
_MOST_DEVICES = 64
"""Largest multiple of the devices that is tried."""
_SHORTEST = 128
"""Smallest ``seq_length`` that is tried."""


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
    for changes in _remedies(plan_input, training, layout, world_size):
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


def _remedies(
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


_ENDS_COUNT: JsonObject = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
_SPLITS: tuple[JsonObject, ...] = ({}, _ENDS_COUNT)
_MICRO_BATCHES = (1, 2, 4, 8)
_REDUCE: JsonObject = {"overlap_grad_reduce": True}
_SPLIT: JsonObject = {"use_distributed_optimizer": True} | _REDUCE
OVERLAPS: tuple[JsonObject, ...] = (_SPLIT | {"overlap_param_gather": True}, _SPLIT, _REDUCE)
"""Overlap options of a search, best first; a run may not support all of them."""
LAYOUT_KEYS = frozenset(
    {*ParallelLayout.__dataclass_fields__, *OVERLAPS[0], *FULL, "recompute_modules", "sequence_parallel"}
    | {"per_device_train_batch_size", "gradient_accumulation_steps", "distribute_saved_activations"}
)
"""Arguments that a search replaces."""
_SIZES = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Fit:
    """Layout that fits: keys to set, arguments with them, bytes of the fullest stage, and tokens per step."""

    changes: JsonObject
    layout: ParallelLayout
    training: "TrainingArguments"
    needs: int
    tokens: int


@dataclass(frozen=True)
class TimedLayout(Fit):
    """Layout that fits, with its predicted step time on ``gpus`` devices."""

    time: StepTime
    gpus: int

    @property
    def speed(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.time.total / self.gpus


def fitting_layouts(
    plan_input: PlanInput,
    training: "TrainingArguments",
    batch: int,
    gpus: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool] = lambda _: True,
) -> Iterator[Fit]:
    """Yield layouts that fit, fastest first by a rough prediction.

    Args:
        plan_input: Input of the plans.
        training: Training arguments; layout, micro-batch and recomputation are replaced. Its options of `OVERLAPS` are
            listed with each layout.
        batch: Global batch size, which stays the same.
        gpus: Number of devices.
        hardware: Device and its efficiencies.
        allowed: Function that returns False for layouts that the run does not support.
    """
    tried = []
    overlap = {name: True for name in OVERLAPS[0] if getattr(training, name)}
    again = recomputations(plan_input, training)
    for layout, keys in candidates(plan_input, batch, gpus, hardware.device.node, again):
        if not allowed(layout):
            continue
        changes = overlap | keys
        args = with_changes(training, changes)
        if minimum_memory(plan_input, args, layout, gpus) > hardware.device.usable_gib * GIB:
            continue
        rough = predict_step_time(plan_input, args, layout, gpus, hardware, roughly=True)
        tried.append((rough, layout, changes, args))
    tried.sort(key=lambda one: one[0].total)
    for _, layout, changes, args in tried:
        plan = plan_layout(plan_input, args, layout, gpus)
        if not stages_over_limit(plan, hardware.device):
            yield Fit(changes, layout, args, largest_stage(plan), plan.tokens_per_step)


def with_step_time(plan_input: PlanInput, fit: Fit, gpus: int, hardware: Hardware) -> TimedLayout:
    """Return ``fit`` with the predicted time of its step."""
    time = predict_step_time(plan_input, fit.training, fit.layout, gpus, hardware)
    return TimedLayout(**vars(fit), time=time, gpus=gpus)


def predict_step_time(
    plan_input: PlanInput,
    training: "TrainingArguments",
    layout: ParallelLayout,
    gpus: int,
    hardware: Hardware,
    *,
    roughly: bool = False,
) -> StepTime:
    """Predict the step time on a layout; ``roughly`` skips the simulation of the schedule."""
    grid = RankGrid(layout, gpus)
    model = chunk_spec(plan_input, training, layout, training.per_device_train_batch_size)
    trained = plan_input.trained_by_stage(layout)
    share = optimizer_shards(training.use_distributed_optimizer, grid)
    return StepTimeModel(model, grid, hardware).step(
        trained, share, forwards=plan_input.forwards, roughly=roughly
    )


def recomputations(plan_input: PlanInput, training: "TrainingArguments") -> tuple[JsonObject, ...]:
    """Return the recomputation options: none, the best saving for its time, and full."""
    config = plan_input.config
    kinds = {config.is_moe_layer(number) for number in range(config.num_layers) if config.has_mlp(number)}
    modules = ["mlp"] if False in kinds else []
    if True in kinds:
        scaled_late = training.fp8 and training.fp8_recipe in (None, "delayed")
        grouped = plan_input.implementation == "transformer_engine" and not scaled_late
        modules += ["moe_act"] if grouped else ["moe"]
        moe = expert_sizes(config)
        paired = moe is not None and moe.shortcut
        if grouped and config.block.parallel_block == "none" and not paired:
            modules.append("layernorm")
    some: JsonObject = {"recompute_granularity": "selective", "recompute_modules": modules}
    return {"recompute_granularity": None}, *([some] if modules else []), FULL


def candidates(
    plan_input: PlanInput, batch: int, gpus: int, node: int, recomputations: tuple[JsonObject, ...]
) -> Iterator[tuple[ParallelLayout, JsonObject]]:
    """Yield the valid layouts with their keys, for each micro-batch size and each of the ``recomputations``."""
    for layout in _layouts(plan_input, gpus, node):
        data = gpus // layout.model_parallel_size
        for size in _MICRO_BATCHES:
            accumulated, rest = divmod(batch, data * size)
            if rest or not accumulated or (layout.vpp > 1 and accumulated % layout.pp):
                continue
            if accumulated < layout.pp:
                continue
            for recompute in recomputations:
                changes = _keys(plan_input.config, layout) | recompute
                changes |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
                if plan_input.runs_forward_alone:
                    changes["per_device_eval_batch_size"] = size
                yield layout, changes


def _keys(config: McaModelConfig, layout: ParallelLayout) -> JsonObject:
    """Return the keys of a layout, including sizes of 1, because a missing key means the size of the checkpoint.

    They also replace the pipeline and expert sizes of an MCA checkpoint.
    """
    keys: JsonObject = {SIZE_FIELDS[short]: getattr(layout, short) for short in _SIZES}
    keys |= {
        name: getattr(layout, name)
        for name, field in ParallelLayout.__dataclass_fields__.items()
        if getattr(layout, name) != field.default
    }
    if config.layout.pp > 1:
        keys[SIZE_FIELDS["vpp"]] = layout.vpp
    if config.layout.etp != config.layout.tp:
        keys[SIZE_FIELDS["etp"]] = layout.etp
    return keys | ({"sequence_parallel": True} if layout.tp > 1 else {})


def _layouts(plan_input: PlanInput, gpus: int, node: int) -> Iterator[ParallelLayout]:
    config = plan_input.config
    for tp in _powers(min(node, gpus)):
        for pp in _divisors(gpus, min(gpus // tp, config.num_layers)):
            for cp in _powers(min(8, gpus // tp // pp)) if plan_input.seq_length >= 8192 else (1,):
                for ep in _powers(config.num_experts or 1):
                    yield from _legal(plan_input, gpus, {"tp": tp, "pp": pp, "cp": cp, "ep": ep})


def _legal(plan_input: PlanInput, gpus: int, sizes: dict[str, int]) -> Iterator[ParallelLayout]:
    """Yield all valid layouts with the given sizes."""
    config = plan_input.config
    per_rank = -(-config.num_layers // sizes["pp"])
    for vpp in _divisors(per_rank, per_rank) if sizes["pp"] > 1 else [1]:
        for etp in {1, sizes["tp"]} if config.num_experts else {None}:
            for split in _SPLITS:
                if split and config.num_layers % (sizes["pp"] * vpp) == 0:
                    continue
                try:
                    layout = ParallelLayout(
                        tensor_model_parallel_size=sizes["tp"],
                        pipeline_model_parallel_size=sizes["pp"],
                        virtual_pipeline_model_parallel_size=vpp,
                        context_parallel_size=sizes["cp"],
                        expert_model_parallel_size=sizes["ep"],
                        expert_tensor_parallel_size=etp if etp != sizes["tp"] else None,
                        **split,
                    )
                except McaError:
                    continue
                parallel = sizes["tp"] > 1
                if not check_layout(config, layout, gpus, plan_input.seq_length, sequence_parallel=parallel):
                    yield layout


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(most, 1).bit_length()) if 1 << power <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, most + 1) if number % size == 0]


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
        (need for _, need in _smallest_layouts(plan_input, training, batch, gpus, hardware, allowed)),
        default=None,
    )
    if least is None:
        return (
            f"no layout divides the model and a global batch of {counted(batch, batch_unit(training))} over "
            f"{counted(gpus, 'device')}; change gradient_accumulation_steps or --gpus"
        )

    usable = hardware.device.usable_gib

    def fits(changed: PlanInput, args: "TrainingArguments", times: int = 1) -> bool:
        found = _smallest_layouts(changed, args, batch * times, gpus * times, hardware, allowed)
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


def _smallest_layouts(
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
