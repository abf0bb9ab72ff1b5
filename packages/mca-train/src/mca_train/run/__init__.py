"""A run of ``mca-train``, from a configuration file to a trained model.

This room puts the others in order. It knows no kind of run: what differs between kinds is said in ``tasks``.
"""
