"""Configuration, parallel layout and checks of mca. Nothing here imports torch.

Exported names are imported on first use, so that ``--help`` of a command is fast. ``TrainingArguments`` and
``Seq2SeqTrainingArguments`` need the extra ``training`` (transformers).
"""

from typing import TYPE_CHECKING

from mca_config.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from mca_config.arguments import DistributingParallelArguments, MegatronArguments
    from mca_config.checks import check_layout, require_layout, sequence_multiple
    from mca_config.errors import McaError
    from mca_config.layout import Coordinates, ParallelLayout, RankGrid
    from mca_config.model_config import McaModelConfig
    from mca_config.pipeline import PipelineChunk, PipelinePlan, pipeline_plan
    from mca_config.training import Seq2SeqTrainingArguments, TrainingArguments

__all__ = [
    "Coordinates",
    "DistributingParallelArguments",
    "McaError",
    "McaModelConfig",
    "MegatronArguments",
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

_HOME = {
    "Coordinates": "layout",
    "DistributingParallelArguments": "arguments",
    "McaError": "errors",
    "McaModelConfig": "model_config",
    "MegatronArguments": "arguments",
    "ParallelLayout": "layout",
    "PipelineChunk": "pipeline",
    "PipelinePlan": "pipeline",
    "RankGrid": "layout",
    "Seq2SeqTrainingArguments": "training",
    "TrainingArguments": "training",
    "check_layout": "checks",
    "pipeline_plan": "pipeline",
    "require_layout": "checks",
    "sequence_multiple": "checks",
}

__getattr__ = make_lazy_getattr(__name__, _HOME)
