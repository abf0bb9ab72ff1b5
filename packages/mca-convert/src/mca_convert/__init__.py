"""CPU-only checkpoint converter of mca; no torch.

Nothing is exported: the package is a command.
"""
