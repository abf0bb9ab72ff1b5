"""Names of files in a checkpoint."""

MCA_CONFIG_NAME = "mca_config.json"
