"""One rank's step of a run, with the run's own engine and trainer, on tensors without memory.

It reads no weights and no data, and starts no ranks. What the layers, the schedule, data parallelism and the optimizer
allocate, compute and send is what they do in the run on this kind of device, with samples that are as long as they
may be.
"""

import copy
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mca_train.batching.loaders import steps_of
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.config.model import adapter_of, model_config
from mca_train.config.parts import trained_parts
from mca_train.dry_run.answers import Answers
from mca_train.dry_run.messages import in_step, told_apart
from mca_train.dry_run.modules import ModuleNames
from mca_train.dry_run.passes import Passes, order_of
from mca_train.dry_run.routing import known_as_arrays, no_rounds_of_sinkhorn, route_evenly
from mca_train.dry_run.samples import LongestSamples
from mca_train.dry_run.tracker import GRADIENTS, KEPT, OPTIMIZER, REFERENCE, STEP, WEIGHTS, Message, Tracker
from mca_train.dry_run.world import fake_world, moving_anew
from mca_train.plan.schedule import Pass
from mca_train.plan.towers import Images

if TYPE_CHECKING:
    from mca_config.model_config import McaModelConfig
    from mca_config.training import TrainingArguments
    from mca_models import VirtualModels
    from mca_train.config.run_config import Settings
    from mca_train.engine.engine import Engine
    from mca_train.tasks.task import Task
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer

_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """What one rank needs for a step, in bytes unless said otherwise."""

    rank: int
    stage: int
    micro_batches: int
    """How many were run."""
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """At the peak: what was kept from one pass for another."""
    temporaries: int
    """At the peak: what the running pass made for itself."""
    peak: int
    operation: str
    module: str
    backward: bool
    """Whether the peak is in a backward pass."""
    curve: tuple[int, ...]
    """Over the step, at most a thousand points."""
    flops: int
    messages: tuple[Message, ...]
    """Of as many micro-batches as were run."""
    passes: tuple[Pass, ...]
    """In the order in which they ran."""
    order: tuple[Pass, ...] = ()
    """Of as many micro-batches as were asked for, in the order in which the engine's schedule runs them."""
    synchronisations: int
    """How often the host read a value."""

    def messages_of(self, micro_batches: int) -> tuple[Message, ...]:
        """Those of a step of so many."""
        return tuple(in_step(message, micro_batches - self.micro_batches) for message in self.messages)


def step_needs(
    task: "Task",
    settings: "Settings",
    model: "McaModelConfig",
    rank: int,
    world_size: int,
    micro_batches: int,
    images: Images | None = None,
    ordered: int = 0,
) -> StepNeeds:
    """What ``rank`` of a run needs for a step of ``micro_batches``, with ``images`` in each sequence.

    To be called in a process of its own, as Megatron's groups are the process's. ``ordered`` micro-batches are only
    put in order.
    """
    from mca_models import AutoModel
    from mca_models.megatron import platform

    platform.prepare()
    with ExitStack() as stack:
        settings = _short(settings, stack.enter_context(tempfile.TemporaryDirectory()), micro_batches)
        for context in (fake_world(rank, world_size), moving_anew(), _blind_optimizer()):
            stack.enter_context(context)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        answers = Answers(fake)
        modes = Modes(Tracker(ModuleNames()), fake, answers)
        stack.enter_context(known_as_arrays(answers))
        stack.enter_context(no_rounds_of_sinkhorn())
        trainer, engine = build(task, settings, model, modes, AutoModel.unfilled, images)
        route_evenly(engine.models, answers)
        batch = next(steps_of(trainer.get_train_dataloader()))
        needs = measure(trainer, engine, modes, batch)
        if not ordered:
            return needs
        with fake, answers:  # nothing is counted
            return replace(needs, order=order_of(engine, batch, ordered, modes.tracker))


def _short(settings: "Settings", folder: str, micro_batches: int) -> "Settings":
    """The same run with another number of micro-batches, elsewhere, without what is evaluated in between.

    Also without what needs no memory and cannot be had here: processes that load data, and looks at values.
    """
    args = copy.copy(settings.training)
    args.output_dir, args.gradient_accumulation_steps = folder, micro_batches
    args.eval_strategy = "no"
    args.dataloader_num_workers, args.dataloader_prefetch_factor = 0, None
    args.check_for_nan_in_grad = None
    return replace(settings, training=args)


@dataclass(frozen=True)
class Modes:
    """What operations go through: the tracker, and below it what stands for memory, if there is none."""

    tracker: Tracker
    fake: FakeTensorMode | None = None
    answers: Answers | None = None

    @contextmanager
    def entered(self, phase: str) -> Iterator[None]:
        """A block of operations, in a phase of the tracker."""
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
    images: Images | None = None,
) -> "tuple[McaTrainer, Engine]":
    """The trainer and the engine of a run on this rank, as they are before the second step; collective.

    Args:
        task: The kind of run.
        settings: The run.
        config: The architecture.
        modes: What operations go through.
        make: Makes the model.
        images: In each sequence; None: there are none.
    """
    args, length = settings.training, settings.data.seq_length
    reference = None
    if (path := task.reference(settings)) is not None:
        with modes.entered(REFERENCE):
            reference = make(model_config(path), args)
            reference.requires_grad_(False)
    with modes.entered(WEIGHTS):
        model = _with_adapter(make(config, args), settings)
    samples = args.gradient_accumulation_steps * args.per_device_train_batch_size
    samples *= model.place.grid.data_parallel_size
    options: TrainerOptions = {
        "model": model,
        "args": args,
        "train_dataset": LongestSamples(samples, length, task.sides, config.num_labels or 1, images),
        "pack_length": length * task.sequences_per_sample,
    }
    with modes.entered(STEP):
        trainer = task.trainer(settings, reference, options)
        trainer.release_first()
    with modes.entered(OPTIMIZER), _wrapping_in(modes.tracker):
        engine = trainer.new_engine()
        engine.optimizer_step()  # which makes its state
    for parameter in model.parameters():
        modes.tracker.assign(parameter, WEIGHTS)
    modes.tracker.names.name(engine.models)
    return trainer, engine


def _with_adapter(model: "VirtualModels", settings: "Settings") -> "VirtualModels":
    """The same, with an adapter whose values nobody needs."""
    from mca_models.megatron.peft import attach_adapter

    adapter = adapter_of(settings.lora, model.config, trained_parts(settings.training))
    return model if adapter is None else attach_adapter(model, *adapter)


@contextmanager
def _wrapping_in(tracker: Tracker) -> Iterator[None]:
    """A block in which what data parallelism allocates is counted as gradients."""
    from mca_train.engine.engine import Engine

    wrap = Engine._wrap

    def counted(engine: Engine, chunks: Sequence[Any]) -> list[Any]:
        with tracker.phase(GRADIENTS):
            return wrap(engine, chunks)

    with patch.object(Engine, "_wrap", counted):
        yield


def measure(trainer: "McaTrainer", engine: "Engine", modes: Modes, batch: StepBatch) -> StepNeeds:
    """Runs one step and says what it needed; collective."""
    tracker = modes.tracker
    passes = Passes(tracker)
    gc.collect()  # an offloaded optimizer is made twice, and the first is a circle
    with (
        modes.entered(STEP),
        passes.followed(),
        tracker.names.following(),
        tracker.following_storages(),
    ):
        tracker.restart()
        given = batch if modes.answers is None else _without_memory(batch, modes.answers)
        for tensor in chain.from_iterable(each.tensors() for each in given.micro_batches):
            tracker.add(tensor)
        trainer.before_forward(given)
        before = {kind: replace(message) for kind, message in tracker.tally.messages.items()}
        passes.forget()  # those of a reference
        engine.forward_backward(given)
        tracker.next_pass()
        engine.optimizer_step()
    tally, place = tracker.tally, trainer.model.place
    sizes = tally.peak.sizes()
    return StepNeeds(
        rank=place.rank,
        stage=place.at.pp,
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
        curve=_thinned(tally.curve),
        flops=tally.flops,
        messages=told_apart(tally, before, passes.of_a_micro_batch(), len(batch.micro_batches)),
        passes=tuple(passes.ran),
        synchronisations=sum(tally.synchronisations.values()),
    )


def _without_memory(batch: StepBatch, answers: Answers) -> StepBatch:
    def converted(micro_batch: MicroBatch) -> MicroBatch:
        values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
        tensors: dict[str, Any] = {
            k: answers.fake_of(v, known=k == "cu_seqlens")
            for k, v in values.items()
            if isinstance(v, torch.Tensor)
        }
        images = micro_batch.images and {
            k: answers.fake_of(v, known=not v.is_floating_point()) for k, v in micro_batch.images.items()
        }
        return replace(micro_batch, **tensors, images=images)

    return replace(batch, micro_batches=tuple(map(converted, batch.micro_batches)))


@contextmanager
def _blind_optimizer() -> Iterator[None]:
    """A block in which Megatron's optimizers do not look at values: their norms, and whether fp16 has overflown.

    From 0.19 on they also ask all ranks whether some of their parameters have a norm apart.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

    unscale = "_unscale_main_grads_and_check_for_nan"
    finite = _finite(getattr(MixedPrecisionOptimizer, unscale))
    with ExitStack() as stack:
        stack.enter_context(patch.object(clip_grads, "l2_norm_impl", _norm))
        stack.enter_context(patch.object(MixedPrecisionOptimizer, unscale, finite))
        if hasattr(MegatronOptimizer, "has_grad_norm_group"):
            stack.enter_context(patch.object(MegatronOptimizer, "has_grad_norm_group", _has_norm_apart))
        yield


def _finite(unscale: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``unscale``, which finds no infinity."""

    def unscaled(optimizer: Any) -> bool:
        unscale(optimizer)
        return False

    return unscaled


def _has_norm_apart(optimizer: Any, group: str) -> bool:
    return any(
        getattr(parameter, "grad_norm_group", None) == group for parameter in optimizer.get_parameters()
    )


def _norm(_: int, __: object, lists: list[list[torch.Tensor]], *___: object) -> tuple[torch.Tensor, None]:
    return torch.stack([torch.norm(tensor) for tensor in lists[0]]).norm().float().reshape(1), None


def _thinned(curve: Sequence[int]) -> tuple[int, ...]:
    """At most a thousand points, of each stretch the highest."""
    width = -(-len(curve) // _POINTS) or 1
    return tuple(max(curve[start : start + width]) for start in range(0, len(curve), width))
