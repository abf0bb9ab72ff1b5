"""Checkpoints that others wrote."""
