"""What a run needs, by arithmetic."""
