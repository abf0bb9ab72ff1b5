"""A run as its user wrote it, parsed and checked."""
