"""CPU-only checkpoint converter of mca, without torch.

The package is a command and exports no names.
"""
