"""Our own modules for Megatron's local layer spec, in plain PyTorch.

What only some families need lies in `families`.
"""
