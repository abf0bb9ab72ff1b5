"""Names of ROLL's ``mcore_adapter`` as LLaMA-Factory imports them, on top of mca; no code of either is copied.

The project called ``mcore-adapter`` on the public package index belongs to neither and is not needed.
"""

from .training_args import (
    DistributingParallelArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

__all__ = ["DistributingParallelArguments", "Seq2SeqTrainingArguments", "TrainingArguments"]
