"""Modules for Megatron's local layer spec, in plain PyTorch.

Modules of single features are in `features`.
"""
