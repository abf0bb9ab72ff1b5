"""A run as its user wrote it is parsed in this room. What is wrong with the whole of it is found in ``run``."""
