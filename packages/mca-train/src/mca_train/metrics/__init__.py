"""Metrics of a run: losses, speed and the files and lines that report them."""
