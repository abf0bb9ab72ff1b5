"""A step of a run on tensors without memory and ranks that are not there: what it needs, before it is started."""
