"""Conversion of checkpoints by ``mca-convert``."""
