"""From a configuration to the live chunks of a rank.

What happens to a built model (saving, adapters) is above it.
"""
