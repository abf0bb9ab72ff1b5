"""Losses: from the last pipeline stage's output to the loss of a step."""
