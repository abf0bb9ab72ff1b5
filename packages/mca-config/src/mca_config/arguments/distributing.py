"""How a model is laid over the ranks and computed: the arguments that loading and converting need.

What only training needs is in `megatron`.
"""

import dataclasses
import functools
import logging
from dataclasses import dataclass

from mca_config.arguments import _additional, _constraints
from mca_config.arguments._option import coerce_options
from mca_config.arguments.options import DistributingOptions
from mca_config.errors import McaError, raise_problems
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.types import JsonObject

_logger = logging.getLogger(__name__)

LAYOUT_FIELDS = tuple(field.name for field in dataclasses.fields(ParallelLayout))
_SPLIT_FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(kw_only=True)
class DistributingParallelArguments(DistributingOptions):
    """Parallel layout and computation of one model. None: what the checkpoint, else Megatron, says."""

    def __post_init__(self) -> None:
        self.additional_configs = _additional.read(self.additional_configs)
        _additional.move_to_arguments(self, self.additional_configs)
        coerce_options(self, DistributingOptions)
        raise_problems(self._problems(), "arguments")
        if self.sequence_parallel is None and (self.tensor_model_parallel_size or 1) > 1 and self._has_ep():
            _say_sequence_parallel_on()
            self.sequence_parallel = True

    def _problems(self) -> list[str]:
        """Every contradiction among the arguments; the levels above add theirs."""
        return _constraints.of_distribution(self) + self._layout_problems()

    def _layout_problems(self) -> list[str]:
        """What is wrong with the layout whatever the checkpoint says."""
        given = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        if "pipeline_model_parallel_size" not in given:
            given = {name: value for name, value in given.items() if name not in _SPLIT_FIELDS}
        try:
            ParallelLayout(**given)
        except McaError as error:
            return [str(error)]
        return []

    def _has_ep(self) -> bool:
        return (self.expert_model_parallel_size or 1) > 1

    def layout(self, base: ParallelLayout | None = None) -> ParallelLayout:
        """The parallel sizes asked for; those left at None come from ``base`` (a checkpoint's layout).

        How the pipeline is split (virtual size, layout string, uneven stages) is one choice: it comes
        from ``base`` only if the pipeline size stays the same and nothing of the split is given.
        """
        base = base or ParallelLayout()
        given = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        inherited = {name: getattr(base, name) for name in LAYOUT_FIELDS}
        same_pipeline = given.get("pipeline_model_parallel_size", base.pp) == base.pp
        if not same_pipeline or any(name in given for name in _SPLIT_FIELDS):
            inherited = {name: value for name, value in inherited.items() if name not in _SPLIT_FIELDS}
        if base.etp == base.tp:
            inherited["expert_tensor_parallel_size"] = None
        return ParallelLayout(**(inherited | given))

    def adopt_layout(self, base: ParallelLayout) -> ParallelLayout:
        """Writes :meth:`layout` of ``base`` into the arguments, so that none of the sizes stays None."""
        layout = self.layout(base)
        for name in LAYOUT_FIELDS:
            setattr(self, name, getattr(layout, name))
        return layout

    def grid(self, world_size: int, base: ParallelLayout | None = None) -> RankGrid:
        """The ranks of ``world_size`` processes laid out as :meth:`layout` says."""
        return RankGrid(self.layout(base), world_size)

    def sequence_parallel_for(self, layout: ParallelLayout) -> bool:
        """Whether activations are cut along the sequence at ``layout``: as asked, else with both tp and ep."""
        if self.sequence_parallel and layout.tp == 1:
            raise McaError(
                "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel"
            )
        both = layout.tp > 1 and layout.ep > 1
        if both and self.sequence_parallel is False:
            raise McaError(_constraints.SEQUENCE_PARALLEL_OFF)
        if both and self.sequence_parallel is None:
            _say_sequence_parallel_on()
        return both if self.sequence_parallel is None else self.sequence_parallel

    def transformer_config_overrides(self) -> JsonObject:
        """All that was asked for beyond the layout, under the names of Megatron's ``TransformerConfig``."""
        names = DistributingOptions.__annotations__.keys() - {*LAYOUT_FIELDS, "additional_configs"}
        given = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        extra = self.additional_configs if isinstance(self.additional_configs, dict) else {}
        return given | extra


@functools.cache
def _say_sequence_parallel_on() -> None:
    _logger.info("sequence_parallel is on: tensor and expert parallelism together need it")
