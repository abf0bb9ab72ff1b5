"""Process groups and collectives of Python objects."""
