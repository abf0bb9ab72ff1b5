"""Arguments of the parallel layout and the computation of a model, for loading and converting.

`megatron` adds the arguments of training.
"""

import dataclasses
import functools
import logging

from mca_config.arguments import _additional
from mca_config.arguments.options import (
    SEQUENCE_PARALLEL_OFF,
    DistributingOptions,
    coerce_options,
    option_problems,
)
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


class DistributingParallelArguments(DistributingOptions):
    """Parallel layout and computation of one model. None: the value of the checkpoint, else Megatron's default."""

    def __post_init__(self) -> None:
        self.additional_configs = _additional.read(self.additional_configs)
        _additional.move_to_arguments(self, self.additional_configs)
        coerce_options(self, DistributingOptions)
        raise_problems(self._problems(), "arguments")
        sizes = (self.tensor_model_parallel_size, self.expert_model_parallel_size)
        if self.sequence_parallel is None and all((size or 1) > 1 for size in sizes):
            _log_sequence_parallel()
            self.sequence_parallel = True

    def _problems(self) -> list[str]:
        """Return all contradictions among the arguments; subclasses add theirs."""
        return option_problems(self) + self._layout_problems()

    def _layout_problems(self) -> list[str]:
        """Return the problems of the layout that do not depend on the checkpoint."""
        sizes = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        if "pipeline_model_parallel_size" not in sizes:
            sizes = {name: value for name, value in sizes.items() if name not in _SPLIT_FIELDS}
        try:
            ParallelLayout(**sizes)
        except McaError as error:
            return [str(error)]
        return []

    def layout(self, base: ParallelLayout | None = None) -> ParallelLayout:
        """Return the requested layout; sizes that are None come from ``base`` (a checkpoint's layout).

        The fields of the pipeline split (virtual size, layout string, uneven stages) belong together: they come
        from ``base`` only if the pipeline size is the same and none of them is set.
        """
        base = base or ParallelLayout()
        sizes = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        inherited = {name: getattr(base, name) for name in LAYOUT_FIELDS}
        same_pipeline = sizes.get("pipeline_model_parallel_size", base.pp) == base.pp
        if not same_pipeline or any(name in sizes for name in _SPLIT_FIELDS):
            inherited = {name: value for name, value in inherited.items() if name not in _SPLIT_FIELDS}
        if base.expert_tensor_parallel_size is None:
            inherited["expert_tensor_parallel_size"] = None
        return ParallelLayout(**(inherited | sizes))

    def grid(self, world_size: int, base: ParallelLayout | None = None) -> RankGrid:
        """Return the grid of ``world_size`` ranks with :meth:`layout`."""
        return RankGrid(self.layout(base), world_size)

    def sequence_parallel_for(self, layout: ParallelLayout) -> bool:
        """Return whether sequence parallelism is on at ``layout``: as requested, else if both tp and ep are above 1."""
        if self.sequence_parallel and layout.tp == 1:
            raise McaError(
                "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel"
            )
        both = layout.tp > 1 and layout.ep > 1
        if both and self.sequence_parallel is False:
            raise McaError(SEQUENCE_PARALLEL_OFF)
        if both and self.sequence_parallel is None:
            _log_sequence_parallel()
        return both if self.sequence_parallel is None else self.sequence_parallel

    def transformer_config_overrides(self) -> JsonObject:
        """Return all set arguments except the layout, under the names of Megatron's ``TransformerConfig``."""
        names = DistributingOptions.__annotations__.keys() - {*LAYOUT_FIELDS, "additional_configs"}
        values = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        extra = self.additional_configs if isinstance(self.additional_configs, dict) else {}
        return values | extra


def _log_sequence_parallel() -> None:
    if _logger.isEnabledFor(logging.INFO):  # a check before logging is set up must not use the one message
        _log_sequence_parallel_once()


@functools.cache
def _log_sequence_parallel_once() -> None:
    _logger.info("sequence_parallel is on: tensor and expert parallelism together need it")
