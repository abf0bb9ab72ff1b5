"""Conversion between MCA and Hugging Face directories, by the ``mca-convert`` command."""
