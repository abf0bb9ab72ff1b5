"""A run of ``mca-train``, from a configuration file to a trained model.

This package puts the others in order: `settings` reads and checks the configuration, `rules` checks the run, `inputs`
reads the data, and `train` starts the ranks. What differs between kinds of run is in ``tasks``.
"""
