"""Samples to the batches of training steps."""
