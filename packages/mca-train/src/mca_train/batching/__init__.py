"""Collation, packing and sampling: from samples to the batches of training steps."""
