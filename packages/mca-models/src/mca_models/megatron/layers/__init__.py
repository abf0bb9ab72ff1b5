"""Our own modules for Megatron's local layer spec, in plain PyTorch."""
