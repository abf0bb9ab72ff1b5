"""Configuration, rank layout and checks of mca. Nothing here imports torch.

``TrainingArguments`` and ``Seq2SeqTrainingArguments`` need the extra ``training`` (transformers) and are
imported when first asked for.
"""

from typing import TYPE_CHECKING, Any

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.checks import check_layout, require_layout, sequence_multiple
from mca_config.errors import McaError
from mca_config.layout import Coordinates, ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_config.pipeline import PipelineChunk, PipelinePlan, pipeline_plan

if TYPE_CHECKING:
    from mca_config.training import Seq2SeqTrainingArguments, TrainingArguments

__all__ = [
    "Coordinates",
    "DistributingParallelArguments",
    "McaError",
    "McaModelConfig",
    "MegatronArguments",
    "MlaMcaModelConfig",
    "ParallelLayout",
    "PipelineChunk",
    "PipelinePlan",
    "RankGrid",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
    "check_layout",
    "pipeline_plan",
    "require_layout",
    "sequence_multiple",
]


def __getattr__(name: str) -> Any:
    if name in ("Seq2SeqTrainingArguments", "TrainingArguments"):
        import mca_config.training as training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
