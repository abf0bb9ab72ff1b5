"""The sub-commands of ``mca-convert``."""
