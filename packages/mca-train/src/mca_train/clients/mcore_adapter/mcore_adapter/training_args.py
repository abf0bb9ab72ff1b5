"""Training arguments of mca that also accept what LLaMA-Factory's examples and parser set."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Never

from mca_config import training
from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import UsageError
from mca_models.megatron import platform
from mca_models.templates import FAMILIES

__all__ = ["DistributingParallelArguments", "Seq2SeqTrainingArguments", "TrainingArguments"]

logger = logging.getLogger(__name__)

_CONSTANTS, _TUNER = "llamafactory.extras.constants", "llamafactory.train.tuner"
_REMEDIES = {"rm": "mca-train reward", "ppo": "verl with mca", "kto": "mca-train kto"}


@dataclass(kw_only=True, repr=False)
class TrainingArguments(training.TrainingArguments):
    """``mca_config.TrainingArguments`` with the remaining keys of ``mcore_adapter``."""

    distributed_timeout_minutes: int | None = field(
        default=None,
        metadata={"help": "Timeout of collective operations; the same as ddp_timeout in seconds."},
    )

    def __post_init__(self) -> None:
        _reject_other_trainers()
        _accept_model_types()
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


def _accept_model_types() -> None:
    """Add mca's model types to LLaMA-Factory's list, which has those of ROLL's ``mcore_adapter``.

    Its workflow raises an error for others after it has read the dataset.
    """
    if (constants := sys.modules.get(_CONSTANTS)) is not None:
        constants.__dict__["MCA_SUPPORTED_MODELS"].update(FAMILIES)


def _reject_other_trainers() -> None:
    """Replace the programs that LLaMA-Factory would call instead of ``mcore_adapter`` by errors.

    Its tuner calls ``run_rm``, ``run_ppo`` and ``run_kto`` with the training arguments of this package, whose layout
    Hugging Face's trainer ignores. With ``use_hyper_parallel`` it does not read ``use_mca``, and only then it calls
    ``is_hyper_parallel_available``.
    """
    if (tuner := sys.modules.get(_TUNER)) is None:
        return
    for stage, remedy in _REMEDIES.items():
        problem = (
            f"stage: {stage} is not supported with USE_MCA: LLaMA-Factory passes only pt, sft and dpo to mca; use "
            f"{remedy}, or unset USE_MCA to train with Hugging Face's trainer"
        )
        setattr(tuner, f"run_{stage}", _rejection(problem))
    problem = (
        "use_hyper_parallel: true is not supported with USE_MCA: LLaMA-Factory would train with HyperParallel and "
        "ignore mca; remove it, or unset USE_MCA"
    )
    tuner.__dict__["is_hyper_parallel_available"] = _rejection(problem)


def _rejection(problem: str) -> Callable[..., Never]:
    def reject(*_arguments: object) -> Never:
        raise UsageError(problem)

    return reject
