"""`make_plan` computes what a run needs on each rank, by arithmetic alone.

It reads no weight and prints nothing: `plan.report` makes the text. Whether the run is possible at all is decided
before, in `run.checks`. The search over layouts asks the same functions.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_train.config.model import layout_of
from mca_train.config.parts import trained_parts
from mca_train.plan.chunks import Bytes, Implementation, Model, forward_alone, of_chunk
from mca_train.plan.counts import Count, ModelCounts, shares
from mca_train.plan.schedule import Order, passes_of
from mca_train.plan.sizes import EIGHTH, HALF, SINGLE, Sizes, width_of
from mca_train.plan.vision_memory import Images

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments
    from mca_models.lora.config import AdapterConfig

GIB = 1024**3
_ADAM_MOMENTS = 2
"""Numbers in fp32 that Adam keeps of a parameter; muon, which keeps fewer, is taken for it."""
PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """What each rank of one pipeline stage holds at its fullest moment, in bytes unless said otherwise."""

    layers: str
    parameters: int
    """How many, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What passes that have run keep for passes to come."""
    temporaries: int
    """What the pass that runs takes for itself."""
    reference: int = 0
    """Weights of the frozen model that preferences are compared with."""
    host: int = 0
    """In host memory: what of the optimizer is offloaded, with its copies of weights and gradients. Not in `total`."""
    in_flight: int = 0
    """Passes at most whose activations are kept: micro-batches, times chunks that each has run through."""
    evaluation: int = 0
    """What a forward pass of evaluation takes in place of activations and temporaries."""
    beforehand: int = 0
    """What the reference takes whose log-probabilities are computed first, when there are weights alone: its own, if
    it is another model, and a forward pass."""
    worst_routing: int = 0
    """More if all tokens that could be sent to this rank's experts were."""

    @property
    def total(self) -> int:
        """All of it; without what kernels, allocators and communication buffers take."""
        running = max(self.activations + self.temporaries, self.evaluation)
        training = self.gradients + self.optimizer + self.reference + running
        return self.weights + max(training, self.beforehand)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole run."""

    layout: ParallelLayout
    world_size: int
    data_parallel_size: int
    implementation: Implementation
    """Whose layers were counted."""
    stages: tuple[StageNeeds, ...]
    total_parameters: int
    trained_parameters: int | None
    """Of an adapter, or of the parts that are not frozen; None: all."""
    global_batch: int
    tokens_per_step: int
    bubble: float
    images: Images | None = None
    """That each sequence was counted with."""
    fp8_copies: int = 0
    """Copies of layers' weights in fp8; 0: products are not in fp8."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned, whatever the layout: the model and what is trained of it, counted once.

    Args:
        config: The architecture.
        seq_length: Tokens of a sequence.
        model: Its parameters.
        sequences: In a sample.
        adapter: Parameters of what is trained instead of the whole model.
        frozen: Of the model that are not trained; None: there are none.
        reference: Of a frozen model that stands beside it.
        implementation: Whose layers.
        on_gpu: Whether it runs there.
        images: Of each sequence; None: there are none.
        evaluated: Whether rows are evaluated too, in micro-batches of their own size.
        precomputed: Whether log-probabilities of the reference are computed before training, in such micro-batches;
            it is gone by then.
        forwards: Forward passes of all samples of a step beside training, as of a reference.
        fp8_transposed: Whether the device's products in fp8 take a transposed copy of a weight.
    """

    config: McaModelConfig
    seq_length: int
    model: ModelCounts
    sequences: int = 1
    adapter: ModelCounts | None = None
    frozen: ModelCounts | None = None
    reference: ModelCounts | None = None
    implementation: Implementation = "local"
    on_gpu: bool = False
    images: Images | None = None
    evaluated: bool = False
    precomputed: bool = False
    forwards: int = 0
    fp8_transposed: bool = True
    _on: dict[ParallelLayout, McaModelConfig] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def on(self, layout: ParallelLayout) -> McaModelConfig:
        """The architecture on a layout."""
        if layout not in self._on:
            self._on[layout] = replace(self.config, layout=layout)
        return self._on[layout]

    @property
    def runs_forward_alone(self) -> bool:
        """Whether there are forward passes without backward passes, in micro-batches of their own size."""
        return self.evaluated or self.precomputed

    def trained_by_stage(self, layout: ParallelLayout) -> list[Count]:
        """Parameters that have gradients, on the fullest rank of each pipeline stage."""
        whole = (self.adapter or self.model).by_stage(layout)
        if self.adapter is not None or self.frozen is None:
            return whole
        left = zip(whole, self.frozen.by_stage(layout), strict=True)
        return [Count(held.dense - none.dense, held.experts - none.experts) for held, none in left]

    @property
    def trained(self) -> int | None:
        """Parameters that are trained; None: all."""
        if self.adapter is not None:
            return self.adapter.total
        return None if self.frozen is None else self.model.total - self.frozen.total


def make_plan(
    config: McaModelConfig,
    training: "TrainingArguments",
    seq_length: int,
    world_size: int,
    *,
    sequences: int = 1,
    adapter: "AdapterConfig | None" = None,
    reference: McaModelConfig | None = None,
    implementation: Implementation = "local",
    on_gpu: bool = False,
) -> Plan:
    """The plan of training ``config`` as ``training`` says.

    Args:
        config: The architecture; its weights are not read.
        training: Training arguments.
        seq_length: Tokens of a sequence.
        world_size: Ranks.
        sequences: In a sample: 2 of preferences.
        adapter: What is trained instead of the whole model.
        reference: A second model that stands beside it.
        implementation: Whose layers.
        on_gpu: Whether it runs there.
    """
    from mca_models.lora import rules_for_training

    layout = layout_of(training, config)
    config = replace(config, layout=layout)
    subject = Subject(
        config=config,
        seq_length=seq_length,
        sequences=sequences,
        model=ModelCounts.of(config),
        adapter=ModelCounts.of_adapter(config, rules_for_training(config, adapter)) if adapter else None,
        frozen=ModelCounts.of_frozen(config, trained_parts(training)),
        reference=ModelCounts.of(replace(reference, layout=layout)) if reference else None,
        implementation=implementation,
        on_gpu=on_gpu,
    )
    return plan_of(subject, training, layout, world_size)


def plan_of(subject: Subject, training: "TrainingArguments", layout: ParallelLayout, world_size: int) -> Plan:
    """The plan of ``subject`` on a layout."""
    config, grid = subject.on(layout), RankGrid(layout, world_size)
    accumulation = training.gradient_accumulation_steps
    batch = training.per_device_train_batch_size * accumulation * grid.data_parallel_size
    model = _model(subject, training, config, training.per_device_train_batch_size)
    evaluating = None
    if subject.runs_forward_alone:
        evaluating = _model(subject, training, config, training.per_device_eval_batch_size)
    return Plan(
        layout=layout,
        world_size=world_size,
        data_parallel_size=grid.data_parallel_size,
        implementation=subject.implementation,
        stages=tuple(_stages(subject, model, grid, evaluating)),
        total_parameters=subject.model.total,
        trained_parameters=subject.trained,
        global_batch=batch,
        tokens_per_step=batch * subject.seq_length * subject.sequences,
        bubble=layout.bubble(accumulation),
        images=subject.images,
        fp8_copies=_fp8_copies(subject, training),
    )


def _model(
    subject: Subject, training: "TrainingArguments", config: McaModelConfig, micro_batch: int
) -> Model:
    sizes = Sizes.of(
        config,
        training,
        subject.seq_length,
        micro_batch=micro_batch,
        sequences=subject.sequences,
        frozen=subject.adapter is not None,
        on_gpu=subject.on_gpu,
    )
    return Model(config, training, sizes, subject.implementation, subject.on_gpu, subject.images)


def least_of(subject: Subject, training: "TrainingArguments", layout: ParallelLayout, world_size: int) -> int:
    """Bytes of the fullest stage without any pass: less than a plan's, and sooner known."""
    width, grid = width_of(subject.config, training), RankGrid(layout, world_size)
    held = [_held(training, width, counts) for counts in _counted(subject, training, grid)]
    return max(stage.total - (stage.reference if subject.precomputed else 0) for stage in held)


def _counted(subject: Subject, training: "TrainingArguments", grid: RankGrid) -> "list[_Counts]":
    """Of each stage."""
    layout = grid.layout
    none = [Count()] * layout.pp
    adapter = subject.adapter.by_stage(layout) if subject.adapter else none
    beside = subject.reference.by_stage(layout) if subject.reference else none
    beside_width = width_of(subject.reference.config, training) if subject.reference else 0
    copies = _fp8_copies(subject, training)
    copied = subject.model.by_stage(layout, layers_only=True) if copies else none
    share = shares(training.use_distributed_optimizer, grid)
    by_stage = zip(
        subject.model.by_stage(layout),
        adapter,
        subject.trained_by_stage(layout),
        beside,
        copied,
        strict=True,
    )
    return [
        _Counts(
            held.total + added.total,
            trained.total,
            trained.dense // share.dense + trained.experts // share.experts,
            reference.total * beside_width,
            quantized.total * copies * EIGHTH,
        )
        for held, added, trained, reference, quantized in by_stage
    ]


def _fp8_copies(subject: Subject, training: "TrainingArguments") -> int:
    """Return the number of copies in fp8 of a weight, which are kept for all micro-batches of a step.

    Forward passes take one and backward passes its transpose. With one scale for a whole tensor, devices whose
    products need no transpose take the same copy in both (Transformer Engine: `is_non_tn_fp8_gemm_supported`).
    """
    scale_of_tensor = training.fp8_recipe in (None, "delayed", "tensorwise")
    return 0 if not training.fp8 else 1 if scale_of_tensor and not subject.fp8_transposed else 2


def _stages(subject: Subject, model: Model, grid: RankGrid, evaluating: Model | None) -> list[StageNeeds]:
    plan = model.config.pipeline_plan()
    share = shares(model.training.use_distributed_optimizer, grid)
    found = []
    for pp, counts in enumerate(_counted(subject, model.training, grid)):
        needs = _needs(model, plan.chunks[pp], pp, counts, share)
        if evaluating is not None:
            alone = int(max(forward_alone(evaluating, chunk) for chunk in plan.chunks[pp]))
            needs = replace(needs, evaluation=alone if subject.evaluated else 0)
            if subject.precomputed:
                needs = replace(needs, beforehand=needs.reference + alone, reference=0)
        found.append(needs)
    return found


@dataclass(frozen=True)
class _Counts:
    """Parameters on a rank: those held, those trained, those whose optimizer state is here."""

    held: int
    trained: int
    stepped: int
    reference: int
    """Bytes of the frozen model beside it."""
    quantized: int
    """Bytes of the copies in fp8 of those held."""


def _held(training: "TrainingArguments", width: int, counts: _Counts) -> StageNeeds:
    """What is there without any pass."""
    half = width == HALF
    moments = SINGLE * (bool(training.sgd_momentum) if training.optimizer == "sgd" else _ADAM_MOMENTS)
    main = SINGLE if half else 0  # the fp32 weights that the optimizer steps
    moved = training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0
    moved = 1.0 if moved is None else moved
    main_moved = moved if training.use_precision_aware_optimizer else 0
    return StageNeeds(
        layers="",
        parameters=counts.held,
        weights=counts.held * width + counts.quantized,
        gradients=counts.trained * _of_gradient(training, width),
        optimizer=int(counts.stepped * (moments * (1 - moved) + main * (1 - main_moved))),
        host=int(counts.stepped * moved * (moments + 2 * SINGLE)),  # with weights and gradients in fp32
        reference=counts.reference,
        activations=0,
        temporaries=0,
    )


def _of_gradient(training: "TrainingArguments", width: int) -> int:
    """Bytes."""
    return HALF if width == HALF and training.accumulate_allreduce_grads_in_fp32 is False else SINGLE


def _needs(
    model: Model, chunks: tuple[PipelineChunk, ...], pp: int, counts: _Counts, share: Count
) -> StageNeeds:
    training, width = model.training, model.sizes.width
    peak = _peak(model, chunks, pp)
    stepping = 0.0
    if _of_gradient(training, width) == HALF and not training.use_precision_aware_optimizer:
        stepping += SINGLE * counts.stepped  # copies of gradients, by which the optimizer steps
    if not model.on_gpu and counts.stepped:  # there the optimizer is one kernel
        largest = model.config.padded_vocab_size * model.config.hidden_size // model.sizes.layout.tp
        stepping += SINGLE * min(largest / share.dense, counts.stepped)
    peak = max(peak, Peak(0.0, stepping, 0), key=Peak.total)
    worst = _peak(model, chunks, pp, worst=True).total() - peak.total() if model.sizes.experts else 0.0
    return replace(
        _held(training, width, counts),
        layers=" | ".join(layers_of(chunk) for chunk in chunks),
        activations=int(peak.kept),
        temporaries=int(peak.running),
        in_flight=peak.in_flight,
        worst_routing=int(max(worst, 0.0)),
    )


def layers_of(chunk: PipelineChunk) -> str:
    """``embedding 0-3 head``."""
    words = ["embedding"] if chunk.has_embedding else []
    if chunk.layers:
        first, last = chunk.layers[0], chunk.layers[-1]
        words.append(f"{first}-{last}" if last > first else f"{first}")
    words += ["mtp"] * bool(chunk.mtp_layers) + ["head"] * chunk.has_loss
    return " ".join(words) or "nothing"


@dataclass(frozen=True)
class Peak:
    """The fullest moment: bytes that are kept, bytes that the pass takes, and passes kept of at most."""

    kept: float
    running: float
    in_flight: int

    def total(self) -> float:
        """All bytes."""
        return self.kept + self.running


def _peak(model: Model, chunks: tuple[PipelineChunk, ...], pp: int, *, worst: bool = False) -> Peak:
    """Of a pipeline rank that runs through its passes in the schedule's order."""
    bytes_of = [of_chunk(model, chunk, worst=worst) for chunk in chunks]
    layout, accumulated = model.sizes.layout, model.training.gradient_accumulation_steps
    group = model.training.microbatch_group_size_per_vp_stage
    order = Order(layout.pp, layout.vpp, accumulated, group)
    return walk(bytes_of, replace(order, micro_batches=min(accumulated, order.filling)), pp)


def walk(bytes_of: list[Bytes], order: Order, pp: int) -> Peak:
    """The fullest moment of the passes of rank ``pp``, whose chunks need ``bytes_of``."""
    best, running, kept, count, most = 0.0, 0.0, 0.0, 0, 0
    for step in passes_of(order, pp):
        chunk = bytes_of[step.chunk]
        taken = chunk.forward if step.forward else chunk.backward
        if step.forward:
            kept, count = kept + chunk.kept, count + 1
            most = max(most, count)
        if kept + taken > best + running:
            best, running = kept, taken
        if not step.forward:
            kept, count = kept - chunk.kept, count - 1
    return Peak(best, running, most)
