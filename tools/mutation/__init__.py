"""Plant small faults in the packages and see whether the tests catch them: ``tools/mutate.py``."""
