"""Training arguments of mca that also accept what LLaMA-Factory's examples and parser set."""

import logging
from dataclasses import dataclass, field

from mca_config import training
from mca_config.arguments import DistributingParallelArguments
from mca_models.megatron import platform

from .model_types import accept_model_types
from .other_trainers import reject_other_trainers

__all__ = ["DistributingParallelArguments", "Seq2SeqTrainingArguments", "TrainingArguments"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, repr=False)
class TrainingArguments(training.TrainingArguments):
    """``mca_config.TrainingArguments`` with the remaining keys of ``mcore_adapter``."""

    distributed_timeout_minutes: int | None = field(
        default=None,
        metadata={"help": "Timeout of collective operations; the same as ddp_timeout in seconds."},
    )

    def __post_init__(self) -> None:
        reject_other_trainers()
        accept_model_types()
        if self.distributed_timeout_minutes is not None:
            self.ddp_timeout = self.distributed_timeout_minutes * 60
        ratio = getattr(self, "warmup_ratio", None)  # transformers 5.6 still has it
        if ratio and not self.warmup_steps:
            self.__dict__.update(warmup_steps=ratio, warmup_ratio=None)
        if self.recompute_granularity == "full" and self.recompute_method is None:
            self.recompute_method, self.recompute_num_layers = "uniform", self.recompute_num_layers or 1
        if self.apply_rope_fusion and (problem := platform.engine_problem()) is not None:
            logger.warning("apply_rope_fusion has no effect without Transformer Engine (%s)", problem)
            self.apply_rope_fusion = None
        super().__post_init__()


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments, training.Seq2SeqTrainingArguments):
    """`TrainingArguments` with the generation arguments of Hugging Face's ``Seq2SeqTrainingArguments``."""
