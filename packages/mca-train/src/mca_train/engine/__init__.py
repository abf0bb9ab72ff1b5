"""Megatron's training step on one rank."""
