"""The live weights of all ranks to checkpoint directories."""
