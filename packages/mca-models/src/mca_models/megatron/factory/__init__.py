"""From a configuration to the live chunks of a rank."""
