"""From what the last pipeline stage computes to the loss of a step."""
