"""Dry run: one training step on fake tensors with fake process groups, to measure its needs before the run."""
