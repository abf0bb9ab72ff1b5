"""Looks for layouts of a number of devices on which a run fits and is fast."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import SIZE_FIELDS, ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_train.plan.chunks import Model
from mca_train.plan.counts import shares
from mca_train.plan.hardware import Hardware
from mca_train.plan.memory import GIB, Subject, least_of, plan_of
from mca_train.plan.remedies import FULL, changed, fullest, over
from mca_train.plan.sizes import Sizes
from mca_train.plan.speed import Speed, StepTime

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_ENDS_COUNT: JsonObject = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
_SPLITS: tuple[JsonObject, ...] = ({}, _ENDS_COUNT)
_MICRO_BATCHES = (1, 2, 4, 8)
_REDUCE: JsonObject = {"overlap_grad_reduce": True}
_SPLIT: JsonObject = {"use_distributed_optimizer": True} | _REDUCE
OVERLAPS: tuple[JsonObject, ...] = (_SPLIT | {"overlap_param_gather": True}, _SPLIT, _REDUCE)
"""What a layout may be searched with, the best first; a run may exclude some of it."""
LAYOUT_KEYS = frozenset(
    {*ParallelLayout.__dataclass_fields__, *OVERLAPS[0], *FULL, "recompute_modules", "sequence_parallel"}
    | {"per_device_train_batch_size", "gradient_accumulation_steps", "distribute_saved_activations"}
)
"""What a search replaces."""


@dataclass(frozen=True)
class Fit:
    """A layout that fits: keys to set, the arguments with them, bytes of the fullest stage, tokens of a step."""

    changes: JsonObject
    layout: ParallelLayout
    training: "TrainingArguments"
    needs: int
    tokens: int


@dataclass(frozen=True)
class Found:
    """The same, with its step's time on so many devices."""

    changes: JsonObject
    layout: ParallelLayout
    time: StepTime
    needs: int
    tokens: int
    gpus: int

    @property
    def speed(self) -> float:
        """Tokens a second and device."""
        return self.tokens / self.time.total / self.gpus


def fitting(
    subject: Subject,
    training: "TrainingArguments",
    batch: int,
    gpus: int,
    hardware: Hardware,
    allowed: Callable[[ParallelLayout], bool] = lambda _: True,
) -> Iterator[Fit]:
    """Those that fit, by a rough prediction the fastest first.

    Args:
        subject: What is trained.
        training: Training arguments, of which layout, micro-batch and recomputation are replaced. What they have of
            `OVERLAPS` is written down with each layout.
        batch: Samples of a step, which stay as many.
        gpus: Devices.
        hardware: What they are.
        allowed: Says of a layout that the model fits whether the run may stand on it.
    """
    tried = []
    overlap = {name: True for name in OVERLAPS[0] if getattr(training, name)}
    again = recomputations(subject, training)
    for layout, keys in _candidates(subject, batch, gpus, hardware.device.node, again):
        if not allowed(layout):
            continue
        changes = overlap | keys
        args = changed(training, changes)
        if least_of(subject, args, layout, gpus) > hardware.device.usable_gib * GIB:
            continue
        rough = predicted(subject, args, layout, gpus, hardware, roughly=True)
        tried.append((rough, layout, changes, args))
    tried.sort(key=lambda one: one[0].total)
    for _, layout, changes, args in tried:
        plan = plan_of(subject, args, layout, gpus)
        if not over(plan, hardware.device):
            yield Fit(changes, layout, args, fullest(plan), plan.tokens_per_step)


def timed(subject: Subject, fit: Fit, gpus: int, hardware: Hardware) -> Found:
    """`fit` with the predicted time of its step."""
    time = predicted(subject, fit.training, fit.layout, gpus, hardware)
    return Found(fit.changes, fit.layout, time, fit.needs, fit.tokens, gpus)


def predicted(
    subject: Subject,
    training: "TrainingArguments",
    layout: ParallelLayout,
    gpus: int,
    hardware: Hardware,
    *,
    roughly: bool = False,
) -> StepTime:
    """The time of a step on a layout; ``roughly``: without walking through its passes."""
    config, grid = subject.on(layout), RankGrid(layout, gpus)
    sizes = Sizes.of(
        config,
        training,
        subject.seq_length,
        sequences=subject.sequences,
        frozen=subject.adapter is not None,
        on_gpu=subject.on_gpu,
    )
    model = Model(config, training, sizes, subject.implementation, subject.on_gpu, subject.images)
    trained = subject.trained_by_stage(layout)
    share = shares(training.use_distributed_optimizer, grid)
    return Speed(model, grid, hardware).step(trained, share, forwards=subject.forwards, roughly=roughly)


def recomputations(subject: Subject, training: "TrainingArguments") -> tuple[JsonObject, ...]:
    """Nothing, what saves most for its time, and everything."""
    config = subject.config
    kinds = {config.is_moe_layer(number) for number in range(config.num_layers) if config.has_mlp(number)}
    modules = ["mlp"] if False in kinds else []
    if True in kinds:
        scaled_late = training.fp8 and training.fp8_recipe in (None, "delayed")
        grouped = subject.implementation == "transformer_engine" and not scaled_late
        modules += ["moe_act"] if grouped else ["moe"]
        if grouped and config.parallel_block == "none" and not config.moe_shortcut:
            modules.append("layernorm")
    some: JsonObject = {"recompute_granularity": "selective", "recompute_modules": modules}
    return {"recompute_granularity": None}, *([some] if modules else []), FULL


def _candidates(
    subject: Subject, batch: int, gpus: int, node: int, recomputations: tuple[JsonObject, ...]
) -> Iterator[tuple[ParallelLayout, JsonObject]]:
    for layout in _layouts(subject, gpus, node):
        data = gpus // layout.model_parallel_size
        for size in _MICRO_BATCHES:
            accumulated, rest = divmod(batch, data * size)
            if rest or not accumulated or (layout.vpp > 1 and accumulated % layout.pp):
                continue
            if layout.pp > 1 and accumulated < layout.pp:
                continue
            for recompute in recomputations:
                changes = _keys(subject.config, layout) | recompute
                changes |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
                if subject.runs_forward_alone:
                    changes["per_device_eval_batch_size"] = size
                yield layout, changes


_SIZES = ("tp", "pp", "cp", "ep")


def _keys(config: McaModelConfig, layout: ParallelLayout) -> JsonObject:
    """What to write for a layout; sizes of 1 too, as leaving them out means those of the checkpoint.

    So an MCA checkpoint's split of the pipeline and of experts is replaced too, by the sizes of both.
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


def _layouts(subject: Subject, gpus: int, node: int) -> Iterator[ParallelLayout]:
    config = subject.config
    for tp in _powers(min(node, gpus)):
        for pp in _powers(min(gpus // tp, config.num_layers)):
            for cp in _powers(min(8, gpus // tp // pp)) if subject.seq_length >= 8192 else (1,):
                for ep in _powers(config.num_moe_experts or 1):
                    yield from _legal(subject, gpus, {"tp": tp, "pp": pp, "cp": cp, "ep": ep})


def _legal(subject: Subject, gpus: int, sizes: dict[str, int]) -> Iterator[ParallelLayout]:
    """All ways to stand on such sizes that the one check lets pass."""
    config = subject.config
    per_rank = -(-config.num_layers // sizes["pp"])
    divisors = [v for v in range(1, per_rank + 1) if per_rank % v == 0]
    for vpp in divisors if sizes["pp"] > 1 else [1]:
        for etp in {1, sizes["tp"]} if config.num_moe_experts else {None}:
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
                if not check_layout(config, layout, gpus, subject.seq_length, sequence_parallel=parallel):
                    yield layout


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(most, 1).bit_length()) if 1 << power <= most]
