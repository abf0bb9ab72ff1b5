"""mca-models."""
