"""From a configuration file to a trained model."""
