"""mca-train."""
