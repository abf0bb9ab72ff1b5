"""Trainers of mca by the names and parameters of ``mcore_adapter``."""

from .dpo_trainer import DPOTrainer
from .trainer import McaTrainer

__all__ = ["DPOTrainer", "McaTrainer"]
