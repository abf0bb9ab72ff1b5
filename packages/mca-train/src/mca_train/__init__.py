"""Megatron-core training on the Hugging Face Trainer's lifecycle.

Exported names are imported on first use: the trainers need torch, transformers and megatron-core.
"""

from typing import TYPE_CHECKING

from mca_config.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from mca_train.batching.micro_batch import MicroBatch
    from mca_train.data.token_dataset import PairDataset, TokenDataset
    from mca_train.losses.preference import PreferenceLoss
    from mca_train.tasks.task import Task
    from mca_train.trainer.dpo import DpoTrainer
    from mca_train.trainer.kto import KtoTrainer
    from mca_train.trainer.scores import ClassificationTrainer, RewardTrainer
    from mca_train.trainer.trainer import McaTrainer

__all__ = [
    "ClassificationTrainer",
    "DpoTrainer",
    "KtoTrainer",
    "McaTrainer",
    "MicroBatch",
    "PairDataset",
    "PreferenceLoss",
    "RewardTrainer",
    "Task",
    "TokenDataset",
]

_HOME = {
    "ClassificationTrainer": "trainer.scores",
    "DpoTrainer": "trainer.dpo",
    "KtoTrainer": "trainer.kto",
    "McaTrainer": "trainer.trainer",
    "MicroBatch": "batching.micro_batch",
    "PairDataset": "data.token_dataset",
    "PreferenceLoss": "losses.preference",
    "RewardTrainer": "trainer.scores",
    "Task": "tasks.task",
    "TokenDataset": "data.token_dataset",
}

__getattr__ = make_lazy_getattr(__name__, _HOME)
