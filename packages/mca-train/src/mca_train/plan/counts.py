"""How many parameters each rank of a stage holds: the model's, an adapter's, and those whose state is here.

They are counted once for a model (`ModelCounts`), by where in the model they stand; a layout then only adds up.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelinePlan

if TYPE_CHECKING:
    from mca_models.lora.rules import AdapterRules, LoraFactors
    from mca_models.weights import Param

Shape = tuple[int, ...]
_LAYERS = ("layer", "mtp")
ModelPart = tuple[str, int]
"""``("first" | "norm" | "last" | "layer" | "mtp", layer)``."""


@dataclass(frozen=True)
class Count:
    """Of experts' parameters, and of all others."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Kind:
    """What decides over how many ranks a parameter is cut."""

    cut: bool
    expert: bool
    row: int = 0
    """Of a vocabulary matrix the elements of a row, as rows are padded; else 0."""
    tied: bool = False
    """A head that is a copy of the embedding: not there on a rank that embeds."""


def params_of(config: McaModelConfig) -> "list[Param]":
    """The rules of every parameter of a model."""
    from mca_models.templates import get_family

    return get_family(config.model_type).params(config)


def shape_of(param: "Param", config: McaModelConfig) -> Shape:
    """The shape of the whole parameter."""
    from mca_models.templates.shapes import full_shape

    return full_shape(param, config)


def adapter_shapes(
    config: McaModelConfig, factors: "Iterable[LoraFactors]"
) -> "Iterator[tuple[Param, Shape]]":
    """The tensors of an adapter's ``factors``, and their shapes."""
    from mca_models.lora.adapter import expected_shapes

    for pair in factors:
        yield from zip((pair.a, pair.b), expected_shapes(config, pair), strict=True)


class ModelCounts:
    """Parameters of a model, or of an adapter on it, by where they stand and how they are cut."""

    def __init__(self, config: McaModelConfig, sized: "Iterable[tuple[Param, Shape]]") -> None:
        self.config = config
        self._elements = Counter[tuple[ModelPart, Kind]]()
        self._by_stage: dict[tuple[ParallelLayout, bool], list[Count]] = {}
        self.total = 0
        """Parameters of the whole model; a tied head is not counted again."""
        for param, shape in sized:
            row = prod(shape[1:]) if param.vocab else 0
            tied = param.alias_of is not None
            kind = Kind(param.shard.axis is not None, param.expert is not None, row, tied)
            self._elements[_model_part(param), kind] += prod(shape)
            self.total += 0 if tied else prod(shape)

    @classmethod
    def of(cls, config: McaModelConfig) -> "ModelCounts":
        """The model's own."""
        return cls(config, ((param, shape_of(param, config)) for param in params_of(config)))

    @classmethod
    def of_adapter(cls, config: McaModelConfig, rules: "AdapterRules") -> "ModelCounts":
        """Those of an adapter that are trained."""
        saved = [(param, shape_of(param, config)) for param in rules.saved]
        return cls(config, [*adapter_shapes(config, rules.factors), *saved])

    @classmethod
    def of_frozen(cls, config: McaModelConfig, trained: Collection[str]) -> "ModelCounts | None":
        """Those of the parts of a vision-language model that are not ``trained``; None: it has no parts."""
        if config.vision is None:
            return None
        from mca_models.megatron.families.vision_tower import model_part

        frozen = [param for param in params_of(config) if model_part(param, config) not in trained]
        return cls(config, ((param, shape_of(param, config)) for param in frozen))

    def by_stage(self, layout: ParallelLayout, *, layers_only: bool = False) -> list[Count]:
        """On the fullest rank of each pipeline stage, vocabulary padding included.

        Args:
            layout: How the ranks stand.
            layers_only: Leave out what stands before, behind and beside the layers.
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


def shares(distributed_optimizer: bool | None, grid: RankGrid) -> Count:
    """Over how many ranks the optimizer state of a dense parameter, and of an expert's, is split."""
    if not distributed_optimizer:
        return Count(1, 1)
    return Count(grid.data_parallel_size * grid.layout.cp, grid.expert_data_parallel_size)


def _model_part(param: "Param") -> ModelPart:
    return param.stage.name.lower(), param.layer or 0


def _stages(part: ModelPart, kind: Kind, plan: PipelinePlan) -> tuple[int, ...]:
    """The pipeline ranks that hold it: of an embedding also that of the prediction layers, which embed too."""
    name, layer = part
    if name in _LAYERS:
        return ((plan.mtp_chunk if name == "mtp" else plan.layer_chunk)(layer).pp,)
    if name == "first" and kind.row:
        return plan.embedding_ranks
    if kind.tied and plan.last.pp in plan.embedding_ranks:
        return ()
    return ({"first": plan.first, "vision": plan.first, "norm": plan.final_norm, "last": plan.last}[name].pp,)
