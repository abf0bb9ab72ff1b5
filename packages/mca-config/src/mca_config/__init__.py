"""mca-config."""
