"""Training checkpoints: written, checked, loaded."""
