"""Trainers of mca by the names and parameters of ``mcore_adapter``."""

from .trainer import DPOTrainer, McaTrainer

__all__ = ["DPOTrainer", "McaTrainer"]
