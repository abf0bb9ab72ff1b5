"""Save, load and export the live weights of all ranks.

Optimizer state is saved by the trainer.
"""
