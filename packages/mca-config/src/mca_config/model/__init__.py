"""Sections of a model's configuration: one file and one class for each feature."""
