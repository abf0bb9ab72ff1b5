"""The live weights of all ranks to checkpoint directories.

The state of optimizers is the trainer's.
"""
