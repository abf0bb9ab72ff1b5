"""mca-convert."""
