"""Numbers that a run reports."""
