"""Conversion of whole checkpoints."""
