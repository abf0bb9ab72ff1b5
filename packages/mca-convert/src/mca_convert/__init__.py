"""CPU-only checkpoint converter of mca; no torch."""

__version__ = "0.1.0"
