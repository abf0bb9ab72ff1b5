"""Parameter counts per rank of a pipeline stage: model, adapter, and optimizer state.

`ModelCounts` counts once per model, by position in the model; each layout only sums these counts.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelinePlan
from mca_models.lora.adapter import expected_shapes
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import model_part
from mca_models.templates.shapes import full_shape

if TYPE_CHECKING:
    from mca_models.lora.rules import AdapterRules, LoraFactors
    from mca_models.weights import Param

Shape = tuple[int, ...]
_LAYERS = ("layer", "mtp")
ModelPart = tuple[str, int]
"""Position of a parameter: ``("first" | "norm" | "last" | "layer" | "mtp", layer)``."""


@dataclass(frozen=True)
class Count:
    """Number of expert parameters and of all other parameters."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True)
class ShardKind:
    """Properties of a parameter that determine its sharding."""

    cut: bool
    expert: bool
    row: int = 0
    """Elements of a row of a vocabulary matrix, whose rows are padded; 0 for other parameters."""
    tied: bool = False
    """Tied output head, which ranks with the embedding do not store."""


def model_params(config: McaModelConfig) -> "list[Param]":
    """Return all parameters of a model."""
    return get_family(config.model_type).params(config)


def adapter_shapes(
    config: McaModelConfig, factors: "Iterable[LoraFactors]"
) -> "Iterator[tuple[Param, Shape]]":
    """Yield the tensors of an adapter's ``factors`` with their shapes."""
    for pair in factors:
        yield from zip((pair.a, pair.b), expected_shapes(config, pair), strict=True)


class ModelCounts:
    """Parameter counts of a model or an adapter, by position and sharding."""

    def __init__(self, config: McaModelConfig, sized: "Iterable[tuple[Param, Shape]]") -> None:
        self.config = config
        self._elements = Counter[tuple[ModelPart, ShardKind]]()
        self._by_stage: dict[tuple[ParallelLayout, bool], list[Count]] = {}
        self.total = 0
        """Parameters of the full model; a tied head is not counted."""
        for param, shape in sized:
            row = prod(shape[1:]) if param.vocab else 0
            tied = param.alias_of is not None
            kind = ShardKind(param.shard.axis is not None, param.expert is not None, row, tied)
            self._elements[(param.stage.name.lower(), param.layer or 0), kind] += prod(shape)
            self.total += 0 if tied else prod(shape)

    @classmethod
    def for_model(cls, config: McaModelConfig) -> "ModelCounts":
        """Count all parameters of a model."""
        return cls(config, ((param, full_shape(param, config)) for param in model_params(config)))

    @classmethod
    def for_adapter(cls, config: McaModelConfig, rules: "AdapterRules") -> "ModelCounts":
        """Count the trained parameters of an adapter."""
        saved = [(param, full_shape(param, config)) for param in rules.saved]
        return cls(config, [*adapter_shapes(config, rules.factors), *saved])

    @classmethod
    def for_frozen(cls, config: McaModelConfig, trained: Collection[str]) -> "ModelCounts | None":
        """Count the parameters of a vision-language model that are not in ``trained`` parts; None for other models."""
        if config.vision is None:
            return None

        frozen = [param for param in model_params(config) if model_part(param, config) not in trained]
        return cls(config, ((param, full_shape(param, config)) for param in frozen))

    def by_stage(self, layout: ParallelLayout, *, layers_only: bool = False) -> list[Count]:
        """Return the count on the fullest rank of each pipeline stage, including vocabulary padding.

        Args:
            layout: Parallel layout.
            layers_only: Count only decoder and MTP layers.
        """
        if (layout, layers_only) not in self._by_stage:
            self._by_stage[layout, layers_only] = self._counted(layout, layers_only)
        return self._by_stage[layout, layers_only]

    def _counted(self, layout: ParallelLayout, layers_only: bool) -> list[Count]:
        config = replace(self.config, layout=layout)
        plan = config.pipeline_plan()
        dense, experts = [0] * layout.pp, [0] * layout.pp
        for (part, kind), elements in self._elements.items():
            if layers_only and part[0] not in _LAYERS:
                continue
            size = config.padded_vocab_size * kind.row if kind.row else elements
            if kind.cut:
                size //= layout.etp if kind.expert else layout.tp
            for stage in _stages(part, kind, plan):
                (experts if kind.expert else dense)[stage] += size
        return [Count(*both) for both in zip(dense, (size // layout.ep for size in experts), strict=True)]


def optimizer_shards(distributed_optimizer: bool | None, grid: RankGrid) -> Count:
    """Return the number of ranks that share the optimizer state of dense and of expert parameters."""
    if not distributed_optimizer:
        return Count(1, 1)
    return Count(grid.data_parallel_size * grid.layout.cp, grid.expert_data_parallel_size)


def _stages(part: ModelPart, kind: ShardKind, plan: PipelinePlan) -> tuple[int, ...]:
    """Return the pipeline ranks with the parameter; the stage of the MTP layers also has the embedding."""
    name, layer = part
    if name in _LAYERS:
        return ((plan.mtp_chunk if name == "mtp" else plan.layer_chunk)(layer).pp,)
    if name == "first" and kind.row:
        return plan.embedding_ranks
    if kind.tied and plan.last.pp in plan.embedding_ranks:
        return ()
    return ({"first": plan.first, "vision": plan.first, "norm": plan.final_norm, "last": plan.last}[name].pp,)
