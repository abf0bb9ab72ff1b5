"""Build and fill the live chunks of a rank from a configuration.

Saving and adapters are in higher modules.
"""
