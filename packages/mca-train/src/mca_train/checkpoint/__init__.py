"""Checkpoints of a training run on disk."""
