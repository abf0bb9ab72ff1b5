"""Memory plan of a run on each rank, by arithmetic alone.

It reads no weights and prints nothing: `plan.report` renders the text. `run.rules` decides before whether the run is
possible. The layout search uses the same functions.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.templates.parts.layer_costs import EIGHTH, HALF, SINGLE
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.chunks import ChunkSpec, Implementation, PassMemory, chunk_memory, forward_only_memory
from mca_train.plan.counts import Count, ModelCounts, optimizer_shards
from mca_train.plan.schedule import Order, rank_passes
from mca_train.plan.sizes import Sizes, element_bytes

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

GIB = 1024**3
_ADAM_MOMENTS = 2
"""fp32 moments of a parameter in Adam; muon, which has fewer, is planned as Adam."""
PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """Needs of a rank of one pipeline stage at its peak, in bytes unless noted otherwise."""

    layers: str
    parameters: int
    """Number of parameters."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Activations that earlier passes saved for later ones."""
    temporaries: int
    """Peak of the running pass itself."""
    reference: int = 0
    """Weights of the frozen reference model."""
    host: int = 0
    """Host memory of the offloaded optimizer, with its copies of weights and gradients. Not in `total`."""
    in_flight: int = 0
    """Maximum number of passes whose activations are saved: micro-batches times chunks."""
    evaluation: int = 0
    """Peak of an evaluation pass, in place of activations and temporaries."""
    beforehand: int = 0
    """Memory for computing reference log-probabilities before training: the reference model's weights, if it is a
    separate model, and a forward pass."""
    worst_routing: int = 0
    """Additional bytes if the experts of this rank received all tokens that could be routed to them."""

    @property
    def total(self) -> int:
        """Peak of all categories, without kernels, allocators and communication buffers."""
        running = max(self.activations + self.temporaries, self.evaluation)
        training = self.gradients + self.optimizer + self.reference + running
        return self.weights + max(training, self.beforehand)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory plan of all stages."""

    layout: ParallelLayout
    world_size: int
    data_parallel_size: int
    implementation: Implementation
    """Implementation of the planned layers."""
    stages: tuple[StageNeeds, ...]
    total_parameters: int
    trained_parameters: int | None
    """Parameters of an adapter, or of the parts that are not frozen; None: all are trained."""
    global_batch: int
    tokens_per_step: int
    bubble: float
    media: PlannedMedia | None = None
    """Images of each sequence in the plan."""
    fp8_copies: int = 0
    """fp8 copies of each weight; 0: GEMMs are not in fp8."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Layout-independent input of a plan, with parameters counted once.

    Args:
        config: Model configuration.
        seq_length: Tokens of a sequence.
        model: Parameter counts of the model.
        sequences: Sequences per sample.
        adapter: Parameter counts of an adapter; None: full fine-tuning.
        frozen: Parameter counts of frozen parts; None: there are none.
        reference: Parameter counts of a separate reference model.
        implementation: Implementation of the layers.
        on_gpu: The run is on a GPU.
        media: Media of each sequence; None: there are none.
        evaluated: The run evaluates, in micro-batches of ``per_device_eval_batch_size``.
        precomputed: Reference log-probabilities are computed before training in evaluation micro-batches, after which
            the reference model is freed.
        forwards: Additional forward passes per sample of a step, such as those of a reference model.
        fp8_transposed: fp8 GEMMs of the device need transposed copies of weights.
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
    media: PlannedMedia | None = None
    evaluated: bool = False
    precomputed: bool = False
    forwards: int = 0
    fp8_transposed: bool = True
    _on: dict[ParallelLayout, McaModelConfig] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def on(self, layout: ParallelLayout) -> McaModelConfig:
        """Return the model configuration with ``layout``."""
        if layout not in self._on:
            self._on[layout] = replace(self.config, layout=layout)
        return self._on[layout]

    @property
    def runs_forward_alone(self) -> bool:
        """True if forward passes run without backward passes, in evaluation micro-batches."""
        return self.evaluated or self.precomputed

    def trained_by_stage(self, layout: ParallelLayout) -> list[Count]:
        """Return the parameters with gradients on the fullest rank of each pipeline stage."""
        whole = (self.adapter or self.model).by_stage(layout)
        if self.adapter is not None or self.frozen is None:
            return whole
        left = zip(whole, self.frozen.by_stage(layout), strict=True)
        return [Count(held.dense - none.dense, held.experts - none.experts) for held, none in left]

    @property
    def trained(self) -> int | None:
        """Number of trained parameters; None: all."""
        if self.adapter is not None:
            return self.adapter.total
        return None if self.frozen is None else self.model.total - self.frozen.total


def plan_layout(
    plan_input: PlanInput, training: "TrainingArguments", layout: ParallelLayout, world_size: int
) -> Plan:
    """Plan ``plan_input`` on a layout."""
    grid = RankGrid(layout, world_size)
    accumulation = training.gradient_accumulation_steps
    batch = training.per_device_train_batch_size * accumulation * grid.data_parallel_size
    model = chunk_spec(plan_input, training, layout, training.per_device_train_batch_size)
    evaluating = None
    if plan_input.runs_forward_alone:
        evaluating = chunk_spec(plan_input, training, layout, training.per_device_eval_batch_size)
    return Plan(
        layout=layout,
        world_size=world_size,
        data_parallel_size=grid.data_parallel_size,
        implementation=plan_input.implementation,
        stages=tuple(_stages(plan_input, model, grid, evaluating)),
        total_parameters=plan_input.model.total,
        trained_parameters=plan_input.trained,
        global_batch=batch,
        tokens_per_step=batch * plan_input.seq_length * plan_input.sequences,
        bubble=layout.bubble(accumulation),
        media=plan_input.media,
        fp8_copies=_fp8_copies(plan_input, training),
    )


def chunk_spec(
    plan_input: PlanInput, training: "TrainingArguments", layout: ParallelLayout, micro_batch: int
) -> ChunkSpec:
    """Return what the memory and the time of a chunk depend on, in micro-batches of ``micro_batch`` samples."""
    config = plan_input.on(layout)
    sizes = Sizes.for_training(
        config,
        training,
        plan_input.seq_length,
        micro_batch=micro_batch,
        sequences=plan_input.sequences,
        frozen=plan_input.adapter is not None,
        on_gpu=plan_input.on_gpu,
    )
    return ChunkSpec(config, training, sizes, plan_input.implementation, plan_input.on_gpu, plan_input.media)


def minimum_memory(
    plan_input: PlanInput, training: "TrainingArguments", layout: ParallelLayout, world_size: int
) -> int:
    """Return the bytes of the fullest stage without activations, a fast lower bound of the plan."""
    width, grid = element_bytes(plan_input.config, training), RankGrid(layout, world_size)
    held = [_static_memory(training, width, counts) for counts in _stage_counts(plan_input, training, grid)]
    return max(stage.total - (stage.reference if plan_input.precomputed else 0) for stage in held)


def _stage_counts(plan_input: PlanInput, training: "TrainingArguments", grid: RankGrid) -> "list[_Counts]":
    layout = grid.layout
    none = [Count()] * layout.pp
    adapter = plan_input.adapter.by_stage(layout) if plan_input.adapter else none
    reference_counts = plan_input.reference.by_stage(layout) if plan_input.reference else none
    reference_width = element_bytes(plan_input.reference.config, training) if plan_input.reference else 0
    copies = _fp8_copies(plan_input, training)
    copied = plan_input.model.by_stage(layout, layers_only=True) if copies else none
    share = optimizer_shards(training.use_distributed_optimizer, grid)
    by_stage = zip(
        plan_input.model.by_stage(layout),
        adapter,
        plan_input.trained_by_stage(layout),
        reference_counts,
        copied,
        strict=True,
    )
    return [
        _Counts(
            held.total + added.total,
            trained.total,
            trained.dense // share.dense + trained.experts // share.experts,
            reference.total * reference_width,
            quantized.total * copies * EIGHTH,
        )
        for held, added, trained, reference, quantized in by_stage
    ]


def _fp8_copies(plan_input: PlanInput, training: "TrainingArguments") -> int:
    """Return the number of copies in fp8 of a weight, which are kept for all micro-batches of a step.

    Forward passes take one and backward passes its transpose. With one scale for a whole tensor, devices whose
    products need no transpose take the same copy in both (Transformer Engine: `is_non_tn_fp8_gemm_supported`).
    """
    scale_of_tensor = training.fp8_recipe in (None, "delayed", "tensorwise")
    return 0 if not training.fp8 else 1 if scale_of_tensor and not plan_input.fp8_transposed else 2


def _stages(
    plan_input: PlanInput, model: ChunkSpec, grid: RankGrid, evaluating: ChunkSpec | None
) -> list[StageNeeds]:
    plan = model.config.pipeline_plan()
    share = optimizer_shards(model.training.use_distributed_optimizer, grid)
    found = []
    for pp, counts in enumerate(_stage_counts(plan_input, model.training, grid)):
        needs = _needs(model, plan.chunks[pp], pp, counts, share)
        if evaluating is not None:
            forward_only = int(max(forward_only_memory(evaluating, chunk) for chunk in plan.chunks[pp]))
            needs = replace(needs, evaluation=forward_only if plan_input.evaluated else 0)
            if plan_input.precomputed:
                needs = replace(needs, beforehand=needs.reference + forward_only, reference=0)
        found.append(needs)
    return found


@dataclass(frozen=True)
class _Counts:
    """Parameters on a rank: stored, trained, and with optimizer state on this rank."""

    held: int
    trained: int
    stepped: int
    reference: int
    """Bytes of the separate reference model."""
    quantized: int
    """Bytes of the fp8 copies of stored weights."""


def _static_memory(training: "TrainingArguments", width: int, counts: _Counts) -> StageNeeds:
    """Return the needs of a stage without activations."""
    half = width == HALF
    moments = SINGLE * (bool(training.sgd_momentum) if training.optimizer == "sgd" else _ADAM_MOMENTS)
    main = SINGLE if half else 0  # fp32 main parameters
    moved = training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0
    moved = 1.0 if moved is None else moved
    main_moved = moved if training.use_precision_aware_optimizer else 0
    return StageNeeds(
        layers="",
        parameters=counts.held,
        weights=counts.held * width + counts.quantized,
        gradients=counts.trained * _gradient_bytes(training, width),
        optimizer=int(counts.stepped * (moments * (1 - moved) + main * (1 - main_moved))),
        host=int(counts.stepped * moved * (moments + 2 * SINGLE)),  # including fp32 weights and gradients
        reference=counts.reference,
        activations=0,
        temporaries=0,
    )


def _gradient_bytes(training: "TrainingArguments", width: int) -> int:
    return HALF if width == HALF and training.accumulate_allreduce_grads_in_fp32 is False else SINGLE


def _needs(
    model: ChunkSpec, chunks: tuple[PipelineChunk, ...], pp: int, counts: _Counts, share: Count
) -> StageNeeds:
    training, width = model.training, model.sizes.width
    peak = _peak(model, chunks, pp)
    stepping = 0.0
    if _gradient_bytes(training, width) == HALF and not training.use_precision_aware_optimizer:
        stepping += SINGLE * counts.stepped  # fp32 copies of gradients for the optimizer step
    if not model.on_gpu and counts.stepped:  # on a GPU the optimizer is one fused kernel
        largest = model.config.padded_vocab_size * model.config.hidden_size // model.sizes.layout.tp
        stepping += SINGLE * min(largest / share.dense, counts.stepped)
    peak = max(peak, Peak(0.0, stepping, 0), key=Peak.total)
    worst = (
        _peak(model, chunks, pp, worst=True).total() - peak.total() if model.sizes.moe is not None else 0.0
    )
    return replace(
        _static_memory(training, width, counts),
        layers=" | ".join(describe_chunk(chunk) for chunk in chunks),
        activations=int(peak.kept),
        temporaries=int(peak.running),
        in_flight=peak.in_flight,
        worst_routing=int(max(worst, 0.0)),
    )


def describe_chunk(chunk: PipelineChunk) -> str:
    """Describe the content of a chunk, such as ``embedding 0-3 head``."""
    words = ["embedding"] if chunk.has_embedding else []
    if chunk.layers:
        first, last = chunk.layers[0], chunk.layers[-1]
        words.append(f"{first}-{last}" if last > first else f"{first}")
    words += ["mtp"] * bool(chunk.mtp_layers) + ["head"] * chunk.has_loss
    return " ".join(words) or "nothing"


@dataclass(frozen=True)
class Peak:
    """Peak of a rank: saved bytes, bytes of the running pass, and the maximum number of saved passes."""

    kept: float
    running: float
    in_flight: int

    def total(self) -> float:
        """Return the total bytes."""
        return self.kept + self.running


def _peak(model: ChunkSpec, chunks: tuple[PipelineChunk, ...], pp: int, *, worst: bool = False) -> Peak:
    """Return the peak of a pipeline rank over its passes in schedule order."""
    bytes_of = [chunk_memory(model, chunk, worst=worst) for chunk in chunks]
    layout, accumulated = model.sizes.layout, model.training.gradient_accumulation_steps
    group = model.training.microbatch_group_size_per_vp_stage
    order = Order(layout.pp, layout.vpp, accumulated, group)
    return find_peak(bytes_of, replace(order, micro_batches=min(accumulated, order.filling)), pp)


def find_peak(bytes_of: list[PassMemory], order: Order, pp: int) -> Peak:
    """Return the peak over the passes of rank ``pp``, whose chunks need ``bytes_of``."""
    best, running, kept, count, most = 0.0, 0.0, 0.0, 0, 0
    for step in rank_passes(order, pp):
        chunk = bytes_of[step.chunk]
        needed = chunk.forward if step.forward else chunk.backward
        if step.forward:
            kept, count = kept + chunk.kept, count + 1
            most = max(most, count)
        if kept + needed > best + running:
            best, running = kept, needed
        if not step.forward:
            kept, count = kept - chunk.kept, count - 1
    return Peak(best, running, most)
