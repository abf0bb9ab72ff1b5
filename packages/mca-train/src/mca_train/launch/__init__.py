"""Launcher of the local ranks of a run."""
