"""Parsing of a run's configuration; ``run`` checks the run as a whole."""
