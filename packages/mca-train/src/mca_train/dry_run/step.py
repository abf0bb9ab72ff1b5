"""Dry run of one rank: a training step with the run's engine and trainer on fake tensors.

It reads neither weights nor data and starts no ranks. The layers, the schedule, data parallelism and the optimizer
allocate, compute and send what they would in a run on this type of device, with samples of maximum length.
"""

import copy
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mca_models import AutoModel
from mca_models.megatron import platform
from mca_models.megatron.peft import attach_adapter
from mca_models.megatron.platform import replaced
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.config.model import make_adapter, model_config
from mca_train.config.model_parts import trained_parts
from mca_train.dry_run.fake_process_group import (
    fake_process_group,
    receive_known_shapes,
    replace_moved_parameters,
)
from mca_train.dry_run.fake_values import FakeValues
from mca_train.dry_run.samples import (
    LongestSamples,
    convert_known_values,
    route_evenly,
    skip_sinkhorn_iterations,
)
from mca_train.dry_run.tracker import (
    GRADIENTS,
    KEPT,
    OPTIMIZER,
    REFERENCE,
    STEP,
    WEIGHTS,
    Message,
    ModuleNames,
    PassTracer,
    Tracker,
    add_micro_batches,
    schedule_order,
    split_per_micro_batch,
)
from mca_train.engine.engine import Engine
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.schedule import Pass
from mca_train.trainer.loaders import iterate_steps

if TYPE_CHECKING:
    from mca_config.model_config import McaModelConfig
    from mca_config.training import TrainingArguments
    from mca_models import VirtualModels
    from mca_train.config.run_config import Settings
    from mca_train.tasks.task import Task
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer

_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """Needs of one rank in a step, in bytes unless noted otherwise."""

    rank: int
    stage: int
    micro_batches: int
    """Micro-batches that ran."""
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """Bytes at the peak that one pass keeps for another."""
    temporaries: int
    """Bytes at the peak that the running pass allocated for itself."""
    peak: int
    operation: str
    module: str
    backward: bool
    """True if the peak is in a backward pass."""
    curve: tuple[int, ...]
    """Allocated bytes over the step, at most 1,000 points."""
    flops: int
    messages: tuple[Message, ...]
    """Messages of the micro-batches that ran."""
    passes: tuple[Pass, ...]
    """Passes in the order in which they ran."""
    order: tuple[Pass, ...] = ()
    """Passes of the requested number of micro-batches, in the order of the engine's schedule."""
    synchronisations: int
    """Number of values that the host read."""

    def messages_in_step(self, micro_batches: int) -> tuple[Message, ...]:
        """Return the messages of a step of ``micro_batches``."""
        return tuple(
            add_micro_batches(message, micro_batches - self.micro_batches) for message in self.messages
        )


def measure_step(
    task: "Task",
    settings: "Settings",
    model: "McaModelConfig",
    rank: int,
    world_size: int,
    micro_batches: int,
    media: PlannedMedia | None = None,
    ordered: int = 0,
) -> StepNeeds:
    """Measure the needs of ``rank`` in a step of ``micro_batches``, with ``media`` in each sequence.

    Call it in a separate process, because Megatron's process groups are global. ``ordered`` micro-batches are scheduled
    without computation.
    """
    platform.prepare()
    with ExitStack() as stack:
        settings = _reduced_settings(
            settings, stack.enter_context(tempfile.TemporaryDirectory()), micro_batches
        )
        for context in (
            fake_process_group(rank, world_size),
            replace_moved_parameters(),
            receive_known_shapes(),
            _skip_optimizer_value_checks(),
        ):
            stack.enter_context(context)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        answers = FakeValues(fake)
        modes = Modes(Tracker(ModuleNames()), fake, answers)
        stack.enter_context(convert_known_values(answers))
        stack.enter_context(skip_sinkhorn_iterations())
        trainer, engine = build(task, settings, model, modes, AutoModel.unfilled, media)
        route_evenly(engine.models, answers)
        batch = next(iterate_steps(trainer.get_train_dataloader()))
        needs = measure(trainer, engine, modes, batch)
        if not ordered:
            return needs
        with fake, answers:  # outside of the tracker
            return replace(needs, order=schedule_order(engine, batch, ordered, modes.tracker))


def _reduced_settings(settings: "Settings", folder: str, micro_batches: int) -> "Settings":
    """Return the settings with ``micro_batches``, another output directory, and no evaluation.

    Also disable loader workers and checks of values, which need no memory and do not work with fake tensors.
    """
    args = copy.copy(settings.training)
    args.output_dir, args.gradient_accumulation_steps = folder, micro_batches
    args.eval_strategy = "no"
    args.dataloader_num_workers, args.dataloader_prefetch_factor = 0, None
    args.check_for_nan_in_grad = None
    return replace(settings, training=args)


@dataclass(frozen=True)
class Modes:
    """Dispatch modes of a dry run: the tracker, and below it fake tensors, if tensors are fake."""

    tracker: Tracker
    fake: FakeTensorMode | None = None
    answers: FakeValues | None = None

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Context that enters all modes, in a phase of the tracker."""
        with ExitStack() as stack:
            for mode in (self.fake, self.answers):
                if mode is not None:
                    stack.enter_context(mode)
            stack.enter_context(self.tracker)
            stack.enter_context(self.tracker.phase(phase))
            yield


def build(
    task: "Task",
    settings: "Settings",
    config: "McaModelConfig",
    modes: Modes,
    make: "Callable[[McaModelConfig, TrainingArguments], VirtualModels]",
    media: PlannedMedia | None = None,
) -> "tuple[McaTrainer, Engine]":
    """Build the trainer and the engine of this rank in their state before the second step; collective.

    Args:
        task: The kind of run.
        settings: Configuration of the run.
        config: Configuration of the model.
        modes: Dispatch modes.
        make: Function that creates the model.
        media: Media of each sequence; None: there are none.
    """
    args, length = settings.training, settings.data.seq_length
    reference = None
    if (path := task.reference(settings)) is not None:
        with modes.enter(REFERENCE):
            reference = make(model_config(path), args)
            reference.requires_grad_(False)
    with modes.enter(WEIGHTS):
        model = _with_adapter(make(config, args), settings)
    samples = args.gradient_accumulation_steps * args.per_device_train_batch_size
    samples *= model.rank_context.grid.data_parallel_size
    options: TrainerOptions = {
        "model": model,
        "args": args,
        "train_dataset": LongestSamples(samples, length, task.sides, config.head.num_labels or 1, media),
        "pack_length": length * task.sequences_per_sample,
    }
    with modes.enter(STEP):
        trainer = task.trainer(settings, reference, options)
        trainer.release_first()
    with modes.enter(OPTIMIZER), _count_wrapping_as_gradients(modes.tracker):
        engine = trainer.new_engine()
        engine.optimizer_step()  # allocates the optimizer state
    for parameter in model.parameters():
        modes.tracker.assign(parameter, WEIGHTS)
    modes.tracker.names.add_names(engine.models)
    return trainer, engine


def _with_adapter(model: "VirtualModels", settings: "Settings") -> "VirtualModels":
    """Return the model with an adapter whose values are not initialised."""
    adapter = make_adapter(settings.lora, model.config, trained_parts(settings.training, model.config))
    return model if adapter is None else attach_adapter(model, *adapter)


@contextmanager
def _count_wrapping_as_gradients(tracker: Tracker) -> Iterator[None]:
    """Context in which allocations of the data-parallel wrapper count as gradients."""
    wrap = Engine._wrap

    def counted(engine: Engine, chunks: Sequence[Any]) -> list[Any]:
        with tracker.phase(GRADIENTS):
            return wrap(engine, chunks)

    with replaced(Engine, "_wrap", counted):
        yield


def measure(trainer: "McaTrainer", engine: "Engine", modes: Modes, batch: StepBatch) -> StepNeeds:
    """Run one step and return its needs; collective."""
    tracker = modes.tracker
    passes = PassTracer(tracker)
    gc.collect()  # an offloaded optimizer is created twice, and the first is a reference cycle
    with modes.enter(STEP), passes.trace(), tracker.names.trace(), tracker.track_storages():
        tracker.restart()
        fake_batch = batch if modes.answers is None else _to_fake_batch(batch, modes.answers)
        for tensor in chain.from_iterable(each.tensors() for each in fake_batch.micro_batches):
            tracker.add(tensor)
        trainer.before_forward(fake_batch)
        before = {kind: replace(message) for kind, message in tracker.tally.messages.items()}
        passes.clear()  # passes of the reference model
        engine.forward_backward(fake_batch)
        tracker.next_pass()
        engine.optimizer_step()
    tally, place = tracker.tally, trainer.model.rank_context
    sizes = tally.peak.sizes()
    return StepNeeds(
        rank=place.rank,
        stage=place.coordinates.pp,
        micro_batches=len(batch.micro_batches),
        weights=sizes[WEIGHTS],
        gradients=sizes[GRADIENTS],
        optimizer=sizes[OPTIMIZER],
        reference=sizes[REFERENCE],
        activations=sizes[KEPT],
        temporaries=sizes[STEP],
        peak=tally.peak.bytes,
        operation=tally.peak.operation,
        module=tally.peak.module,
        backward=tally.peak.backward,
        curve=_downsample(tally.curve),
        flops=tally.flops,
        messages=split_per_micro_batch(tally, before, passes.micro_batch_passes(), len(batch.micro_batches)),
        passes=tuple(passes.ran),
        synchronisations=sum(tally.synchronisations.values()),
    )


def _to_fake_batch(batch: StepBatch, answers: FakeValues) -> StepBatch:
    def converted(micro_batch: MicroBatch) -> MicroBatch:
        values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
        tensors: dict[str, Any] = {
            k: answers.to_fake(v, known=k == "cu_seqlens")
            for k, v in values.items()
            if isinstance(v, torch.Tensor)
        }
        images = micro_batch.images and {
            k: answers.to_fake(v, known=not v.is_floating_point()) for k, v in micro_batch.images.items()
        }
        return replace(micro_batch, **tensors, images=images)

    return replace(batch, micro_batches=tuple(map(converted, batch.micro_batches)))


@contextmanager
def _skip_optimizer_value_checks() -> Iterator[None]:
    """Context in which Megatron's optimizers skip gradient norms and fp16 overflow checks.

    From 0.19 on they also reduce over all ranks whether parameters have a separate gradient norm group.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

    unscale = "_unscale_main_grads_and_check_for_nan"
    finite = _without_inf_check(getattr(MixedPrecisionOptimizer, unscale))
    with ExitStack() as stack:
        stack.enter_context(replaced(clip_grads, "l2_norm_impl", _l2_norm))
        stack.enter_context(replaced(MixedPrecisionOptimizer, unscale, finite))
        if hasattr(MegatronOptimizer, "has_grad_norm_group"):
            stack.enter_context(replaced(MegatronOptimizer, "has_grad_norm_group", _has_grad_norm_group))
        yield


def _without_inf_check(unscale: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap ``unscale`` so that it reports no overflow."""

    def unscaled(optimizer: Any) -> bool:
        unscale(optimizer)
        return False

    return unscaled


def _has_grad_norm_group(optimizer: Any, group: str) -> bool:
    return any(
        getattr(parameter, "grad_norm_group", None) == group for parameter in optimizer.get_parameters()
    )


def _l2_norm(_: int, __: object, lists: list[list[torch.Tensor]], *___: object) -> tuple[torch.Tensor, None]:
    return torch.stack([torch.norm(tensor) for tensor in lists[0]]).norm().float().reshape(1), None


def _downsample(curve: Sequence[int]) -> tuple[int, ...]:
    """Return the maxima of at most 1,000 equal segments."""
    width = -(-len(curve) // _POINTS) or 1
    return tuple(max(curve[start : start + width]) for start in range(0, len(curve), width))
