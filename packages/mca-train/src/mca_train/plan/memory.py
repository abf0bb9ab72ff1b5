"""`make_plan` computes what a run needs on each rank, by arithmetic alone.

It reads no weight and prints nothing: `plan.report` makes the text. Whether the run is possible at all is decided
before, in `run.checks`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_train.config.model import layout_of

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments
    from mca_models.lora.config import AdapterConfig
    from mca_models.lora.rules import Factors
    from mca_models.weights import Param

Shape = tuple[int, ...]

GIB = 1024**3
_HALF, _SINGLE = 2, 4
"""Bytes of a number in bf16 or fp16, and in fp32."""
_ADAM_MOMENTS, _SGD_MOMENTS = 2, 1
"""Numbers in fp32 that Megatron's optimizers keep of a parameter; muon, which keeps fewer, is taken for Adam."""
PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """What each rank of one pipeline stage holds, in bytes unless said otherwise."""

    layers: str
    parameters: int
    """How many, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    reference: int = 0
    """Weights of the frozen model that preferences are compared with."""
    host: int = 0
    """In host memory: what of the optimizer is offloaded, with its copies of weights and gradients. Not in `total`."""

    @property
    def total(self) -> int:
        """All of it; without what Megatron, kernels and communication buffers take."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.reference


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole run."""

    layout: ParallelLayout
    world_size: int
    data_parallel_size: int
    stages: tuple[StageNeeds, ...]
    total_parameters: int
    trained_parameters: int | None
    """Of an adapter; None: all."""
    global_batch: int
    tokens_per_step: int
    bubble: float


def make_plan(
    config: McaModelConfig,
    training: "TrainingArguments",
    seq_length: int,
    world_size: int,
    *,
    adapter: "AdapterConfig | None" = None,
    reference: McaModelConfig | None = None,
) -> Plan:
    """The plan of training ``config`` as ``training`` says.

    Args:
        config: The architecture; its weights are not read.
        training: Training arguments.
        seq_length: Tokens of a sample.
        world_size: Ranks.
        adapter: What is trained instead of the whole model.
        reference: A second model that stands beside it.
    """
    layout = layout_of(training, config)
    config = replace(config, layout=layout)
    grid = RankGrid(layout, world_size)
    data_parallel = grid.data_parallel_size
    accumulation = training.gradient_accumulation_steps
    batch = training.per_device_train_batch_size * accumulation * data_parallel
    held = _model_by_stage(config)
    trained = _adapter_by_stage(config, adapter) if adapter else held
    beside = _model_by_stage(replace(reference, layout=layout)) if reference else [_Count()] * layout.pp
    copies = _shares(training, grid)
    stages = (
        _needs(
            config,
            training,
            pp,
            _Counts(
                held[pp].total + (trained[pp].total if adapter else 0),
                trained[pp].total,
                trained[pp].dense // copies.dense + trained[pp].experts // copies.experts,
                beside[pp].total,
            ),
            seq_length,
        )
        for pp in range(layout.pp)
    )
    return Plan(
        layout=layout,
        world_size=world_size,
        data_parallel_size=data_parallel,
        stages=tuple(stages),
        total_parameters=_total_parameters(config),
        trained_parameters=_total_of_adapter(config, adapter) if adapter else None,
        global_batch=batch,
        tokens_per_step=batch * seq_length,
        bubble=layout.bubble(accumulation),
    )


def _shares(training: "TrainingArguments", grid: RankGrid) -> "_Count":
    """Over how many ranks the optimizer state of a dense parameter, and of an expert's, is split."""
    if not training.use_distributed_optimizer:
        return _Count(1, 1)
    return _Count(grid.data_parallel_size * grid.layout.cp, grid.expert_data_parallel_size)


def params_of(config: McaModelConfig) -> "list[Param]":
    """The rules of every parameter of a model."""
    from mca_models.templates import family_of

    return family_of(config.model_type).params(config)


def shape_of(param: "Param", config: McaModelConfig) -> Shape:
    """The shape of the whole parameter."""
    from mca_models.templates.shapes import whole_shape

    return whole_shape(param, config)


def _total_parameters(config: McaModelConfig) -> int:
    return sum(prod(shape_of(param, config)) for param in params_of(config) if param.alias_of is None)


@dataclass(frozen=True)
class _Count:
    """Of experts' parameters, and of all others."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts


def _model_by_stage(config: McaModelConfig) -> list[_Count]:
    """Parameters of the model on the fullest rank of each pipeline stage, vocabulary padding included."""
    return _by_stage(config, ((param, shape_of(param, config)) for param in params_of(config)))


def _adapter_by_stage(config: McaModelConfig, adapter: "AdapterConfig") -> list[_Count]:
    """The same of an adapter."""
    return _by_stage(config, _adapter_shapes(config, adapter))


def _total_of_adapter(config: McaModelConfig, adapter: "AdapterConfig") -> int:
    return sum(prod(shape) for _, shape in _adapter_shapes(config, adapter))


def _adapter_shapes(config: McaModelConfig, adapter: "AdapterConfig") -> "Iterator[tuple[Param, Shape]]":
    from mca_models.lora.rules import rules_for_training

    rules = rules_for_training(config, adapter)
    yield from adapter_shapes(config, rules.factors)
    for param in rules.saved:
        yield param, shape_of(param, config)


def adapter_shapes(config: McaModelConfig, factors: "Iterable[Factors]") -> "Iterator[tuple[Param, Shape]]":
    """The tensors of an adapter's ``factors``, and their shapes."""
    from mca_models.lora.adapter import expected_shapes

    for pair in factors:
        yield from zip((pair.a, pair.b), expected_shapes(config, pair), strict=True)


def _by_stage(config: McaModelConfig, sized: "Iterable[tuple[Param, Shape]]") -> list[_Count]:
    from mca_models.checkpoint.placement import stage_of

    layout, plan = config.layout, config.pipeline_plan()
    dense, experts = [0] * layout.pp, [0] * layout.pp
    for param, shape in sized:
        if param.vocab:
            shape = (config.padded_vocab_size, *shape[1:])
        size = prod(shape)
        stage = stage_of(param, plan)
        if param.alias_of is not None and plan.first.pp == stage:
            continue  # a tied head on the embedding's own rank
        if param.shard.axis is not None:
            size //= layout.tp if param.expert is None else layout.etp
        counts = dense if param.expert is None else experts
        counts[stage] += size
    return [_Count(*counts) for counts in zip(dense, (count // layout.ep for count in experts), strict=True)]


@dataclass(frozen=True)
class _Counts:
    """Parameters on a rank: those held, those trained, those whose optimizer state is here, the reference's."""

    held: int
    trained: int
    stepped: int
    reference: int


def _needs(
    config: McaModelConfig, training: "TrainingArguments", pp: int, counts: _Counts, seq_length: int
) -> StageNeeds:
    half = training.bf16 or training.fp16
    width = _HALF if half else _SINGLE
    gradients = _HALF if half and training.accumulate_allreduce_grads_in_fp32 is False else _SINGLE
    moments = _SINGLE * (_SGD_MOMENTS if training.optimizer == "sgd" else _ADAM_MOMENTS)
    main = _SINGLE if half else 0  # the fp32 weights that the optimizer steps
    moved = training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0
    moved = 1.0 if moved is None else moved
    main_moved = moved if training.use_precision_aware_optimizer else 0
    chunks = config.pipeline_plan().chunks[pp]
    return StageNeeds(
        layers=" | ".join(_layers(chunk) for chunk in chunks),
        parameters=counts.held,
        weights=counts.held * width,
        gradients=counts.trained * gradients,
        optimizer=int(counts.stepped * (moments * (1 - moved) + main * (1 - main_moved))),
        host=int(counts.stepped * moved * (moments + 2 * _SINGLE)),  # with weights and gradients in fp32
        reference=counts.reference * width,
        activations=_activations(config, training, pp, seq_length, width),
    )


def _layers(chunk: PipelineChunk) -> str:
    """``embedding 0-3 head``."""
    words = ["embedding"] if chunk.has_embedding else []
    if chunk.layers:
        first, last = chunk.layers[0], chunk.layers[-1]
        words.append(f"{first}-{last}" if last > first else f"{first}")
    words += ["mtp"] * bool(chunk.mtp_layers) + ["head"] * chunk.has_loss
    return " ".join(words) or "nothing"


def _activations(
    config: McaModelConfig, training: "TrainingArguments", pp: int, seq_length: int, width: int
) -> int:
    """What backward passes still need when most micro-batches are in flight: an estimate.

    For each token and layer: the inputs of its two norms and of its four products, on this rank. With full
    recomputation only the layer's input.
    """
    layout = config.layout
    tokens = training.per_device_train_batch_size * seq_length // layout.cp
    chunks = config.pipeline_plan().chunks[pp]
    layers = sum(len(chunk.layers) for chunk in chunks)
    in_flight = min(layout.pp - pp, training.gradient_accumulation_steps)
    if layout.vpp > 1:  # interleaving keeps up to (pp - 1) / (pp * vpp) more
        in_flight = in_flight * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))
    experts = (
        training.sequence_parallel is None and config.num_moe_experts is not None
    )  # then it is turned on
    whole = layout.tp if training.sequence_parallel or experts else 1
    hidden = config.hidden_size
    if training.recompute_granularity == "full":
        elements = hidden / whole
    else:
        queries = config.num_attention_heads * config.kv_channels
        keys = 2 * config.num_query_groups * config.kv_channels
        mlp = config.ffn_hidden_size
        if config.num_moe_experts:
            mlp = (config.moe_ffn_hidden_size or mlp) * config.moe_router_topk
        elements = 4 * hidden / whole + (2 * queries + keys + 3 * mlp) / layout.tp
    size = tokens * elements * layers * in_flight * width
    if any(chunk.has_loss for chunk in chunks):
        size += tokens * config.padded_vocab_size / layout.tp * (width + _SINGLE)  # logits, their softmax
    return int(size)
