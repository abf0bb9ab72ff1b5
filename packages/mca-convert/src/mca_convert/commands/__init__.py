"""The sub-commands of ``mca-convert``: their arguments, output and exit codes."""
